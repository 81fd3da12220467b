"""Videos in folders, here or in object storage, and in data sets of LeRobot."""

import json
import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import log
from adamae.pipeline.decoding.containers import VIDEO_EXTENSIONS
from adamae.pipeline.reading.storage import ObjectStore
from adamae.pipeline.videos.opening import PICTURE, may_be_video
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.item import HIDDEN, UNKNOWN, Item, Skipped
from adamae.shard_tools.inputs.location import import_pyarrow

# S3 lists 1,000 files in about .1 s, so this is enough for tens of millions.
LISTING_TIMEOUT_S = 3600.0
# The file by which a folder is known to be a data set of LeRobot.
LEROBOT = "meta/info.json"
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
# Entries of a folder that are looked at to tell whether it holds frames.
NUM_LOOKED_AT = 100
# What systems keep beside a user's files: deleted files, thumbnails, forks of files.
SYSTEM = {
    "#recycle",
    "#snapshot",
    "$RECYCLE.BIN",
    "@eaDir",
    "RECYCLER",
    "System Volume Information",
    "__MACOSX",
    "lost+found",
}
FRAME_FOLDERS = "folders of frames beside videos"
TABLES = "tables and texts: give a list of videos itself as INPUT"
PARQUET = "tables in Parquet, which are read where no videos lie beside them"
ARCHIVE = r"\.(zip|7z|rar|tgz|tbz2?|txz|gz|bz2|xz|zst|lz4)"
# What files that are no videos are, and what to do about them; the first pattern in a name decides.
KINDS = {
    "unfinished downloads: complete them": r"\.(part|ytdl|crdownload|download|partial|aria2)$",
    "volumes (NIfTI, DICOM, microscopes): save the frames of each video as an .npy": (
        r"\.(nii(\.gz)?|dcm|czi|nd2|lif)$"
    ),
    "archives: unpack them": rf"(?<!\.part\d)(?<!\.part\d\d){ARCHIVE}$",
    "parts of archives: join those of tar (cat PART* > ARCHIVE),"
    " unpack the first of 7z, rar or zip with 7z": (
        rf"(({ARCHIVE}|\.tar)[-._]?(part)?[-._]?([a-z]{{2}}|\d{{1,3}})|\.z\d\d|\.part\d+\.rar)$"
    ),
    "tars, which are read only where they lie in INPUT itself, not below it": r"\.tar$",
    "TIFF files: save a stack as an .npy, or its frames as numbered .png files in a folder": (
        r"\.tiff?$"
    ),
    "pictures: convert animated ones to .mp4; numbered frames lie in a folder of their own": (
        r"\.(jpe?g|png|apng|bmp|webp|heic|heif|avif)$"
    ),
    "arrays: save the frames of each video as an .npy": r"\.(npz|h5|hdf5|mat|pkl|pickle|pt|zarr)$",
    "raw frames: give them a header (ffmpeg -s WIDTHxHEIGHT -i IN.yuv OUT.y4m)": r"\.(yuv|rgb)$",
    "playlists of streams: save each as a file (ffmpeg -i PLAYLIST -c copy VIDEO.mp4)": (
        r"\.(m3u8|mpd)$"
    ),
    TABLES: r"\.(csv|tsv|txt|json|jsonl|ndjson|xlsx?|xml)$",
    PARQUET: r"\.parquet$",
}


def walk_folders(folder: Path, skipped: Skipped) -> Iterator[tuple[str, list[str]]]:
    """Yield all folders (as "" or "run/"), each once, with the names of their files.

    Hidden folders and those of the system are skipped. Raise InputError if a folder cannot be
    listed.
    """
    seen: set[tuple[int, int]] = set()
    for parent, inner_folders, files in os.walk(
        folder, followlinks=True, onerror=_refuse_unlistable
    ):
        prefix = "" if parent == str(folder) else os.path.relpath(parent, folder) + "/"
        status = os.stat(parent)
        # A link may lead back up, and a walk would never end.
        if (status.st_dev, status.st_ino) in seen:
            skipped.add("folders that were seen under another name", prefix.rstrip("/"))
            inner_folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        visible_folders = []
        for name in inner_folders:
            if is_hidden(name):
                skipped.add(HIDDEN, f"{prefix}{name}/")
            else:
                visible_folders.append(name)
        # os.walk descends into what is in its list.
        inner_folders[:] = sorted(visible_folders)
        yield prefix, files


def list_folder(folder: Path, skipped: Skipped) -> Iterator[Item]:
    """Yield the videos below `folder`; tars in `folder` itself are neither yielded nor skipped."""
    for prefix, files in walk_folders(folder, skipped):
        if prefix and is_frame_folder(folder / prefix):
            skipped.add(FRAME_FOLDERS, prefix.rstrip("/"))
            files = [name for name in files if not name.lower().endswith(PICTURES)]
        for name in files:
            path = folder / prefix / name
            kind = classify_name(name)
            if kind is None or (kind == UNKNOWN and may_be_video(path)):
                yield make_item(prefix + name, path)
            elif kind == HIDDEN or not name.endswith(".tar") or prefix:
                skipped.add(kind, prefix + name)


def list_url(url: str, skipped: Skipped) -> Iterator[Item]:
    """Yield the videos below a folder in object storage. Raise InputError if it has no listing."""
    log(f"listing {url}")
    store = ObjectStore(url)
    for name, num_bytes in store.sizes(timeout=LISTING_TIMEOUT_S).items():
        # Pages of web servers link to what lies outside of the folder.
        if is_remote(name):
            continue
        parts = name.split("/")
        kind = HIDDEN if any(map(is_hidden, parts)) else classify_name(parts[-1])
        if kind is not None:
            skipped.add(kind, name)
            continue
        problem = None
        if "::" in name:
            # fsspec chains file systems so.
            problem = "its name holds ::, which stands for an archive in URLs: rename it"
        yield Item(name, f"{store.url}/{name}", None, num_bytes, problem)


def find_lerobot_sets(folder: Path) -> list[Path]:
    """List the data sets of LeRobot: the folder itself, or those in it."""
    info = folder / LEROBOT
    infos = [info] if info.is_file() else sorted(folder.glob(f"*/{LEROBOT}"))
    return [info.parent.parent for info in infos if b"codebase_version" in info.read_bytes()]


def list_episodes(folder: Path, where: Path) -> Iterator[Item]:
    """Yield the episodes of a data set of LeRobot, an item an episode and camera.

    Version 2 has a file an episode, version 3 has several in a file: these are segments. Names are
    relative to `where`. Raise InputError if the tables are not LeRobot's.
    """
    try:
        info = json.loads((folder / LEROBOT).read_text(encoding="utf-8"))
        features = info["features"].items()
        cameras = [name for name, feature in features if feature["dtype"] == "video"]
        for episode in _read_episodes(folder):
            for camera in cameras:
                yield _make_episode(folder, where, info, episode, camera)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{folder} is a data set of LeRobot, and its tables in meta/ cannot be read"
        fix = "give the folder videos/ in it, with --unlabeled"
        raise InputError(f"{what} ({error!r}): {fix}") from error


def _make_episode(
    folder: Path, where: Path, info: dict[str, Any], episode: dict[str, Any], camera: str
) -> Item:
    index = episode["episode_index"]
    # The names that a template such as videos/{video_key}/file-{file_index:03d}.mp4 holds.
    names = {"episode_index": index, "episode_chunk": index // info["chunks_size"]}
    # Version 3 has a column a camera, such as videos/top/from_timestamp.
    prefix = f"videos/{camera}/"
    for column, value in episode.items():
        if column.startswith(prefix):
            names[column.removeprefix(prefix)] = value
    path = folder / info["video_path"].format(video_key=camera, **names)
    fields = {"episode": index, "camera": camera}
    for name in ("tasks", "length"):
        if name in episode:
            fields[name] = episode[name]
    segment = ""
    if "from_timestamp" in names:
        segment = str(Segment(names["from_timestamp"], names["to_timestamp"]))
    item = make_item(path.relative_to(where).as_posix(), path)
    text = json.dumps(fields, ensure_ascii=False)
    return msgspec.structs.replace(item, segment=segment, fields=text)


def _read_episodes(folder: Path) -> Iterator[dict[str, Any]]:
    tables = sorted(folder.glob("meta/episodes/**/*.parquet"))
    if not tables:
        with (folder / "meta/episodes.jsonl").open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
    for table in tables:
        file = import_pyarrow(str(table)).ParquetFile(table)
        # Statistics of the actions are most of the bytes.
        columns = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()


def is_frame_folder(folder: str | Path) -> bool:
    """Return whether a folder holds numbered pictures, the frames of a video."""
    return any(PICTURE.fullmatch(entry.name) for entry in islice(os.scandir(folder), NUM_LOOKED_AT))


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name in SYSTEM


def classify_name(name: str) -> str | None:
    """Return the kind under which a file of this name is skipped; None for a video."""
    if is_hidden(name):
        return HIDDEN
    if has_video_extension(name):
        return None
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return UNKNOWN


def has_video_extension(name: str) -> bool:
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name


def _refuse_unlistable(error: OSError) -> None:
    what = f"{error.filename} cannot be listed ({error.strerror})"
    raise InputError(f"{what}: make it readable, or move it") from error


def make_item(source: str, path: Path) -> Item:
    return Item(source, str(path.absolute()), None, *examine(path))


def examine(path: Path) -> tuple[int, str | None]:
    """Return the bytes of a file, and the reason why it can be no video, if there is one."""
    try:
        status = path.stat()
    except ValueError:
        # Lists may hold a zero byte.
        return 0, "no file can have its name"
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            return 0, "it is a link to a file that does not exist"
        return 0, "there is no such file"
    except OSError as error:
        return 0, f"it cannot be read ({error.strerror})"
    if stat.S_ISDIR(status.st_mode):
        return 0, "it is a folder, not a video file"
    if not stat.S_ISREG(status.st_mode):
        return 0, "it is a device or a pipe, not a video file"
    if not os.access(path, os.R_OK):
        return 0, "no permission to read it"
    return status.st_size, None

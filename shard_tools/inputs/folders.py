"""Videos in folders, here or in object storage, and in data sets of LeRobot."""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import msgspec

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.pipeline.decoding.containers import VIDEO_EXTENSIONS
from adamae.pipeline.videos.opening import PICTURE, may_be_video
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.item import FOLDER, HIDDEN, UNKNOWN, Item, ListOptions, Skipped
from adamae.shard_tools.inputs.location import import_pyarrow

LEROBOT = "meta/info.json"
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FRAME_FOLDERS = "folders of frames beside videos"
TABLES = "tables and texts: give a list of videos itself as INPUT"
PARQUET = "tables in Parquet, which are read where no videos lie beside them"
NUM_LOOKED_AT = 100  # entries of a folder
PART = re.compile(  # of video2dataset and others; days, cameras, recordings
    r"\d{5,}|\d{4}[-_.]\d\d[-_.]\d\d.*|(part|chunk|shard|batch|cam|camera|view|session|rec|recording|episode)[-_]?\d+",
    re.IGNORECASE,
)
PLACES = set(
    "video videos clip clips data raw full media files frames images mp4 downloads".split()
)  # of all classes
NUM_NAMED = 5  # folders in a sentence
SUBSETS = {
    "train": "train training trainset",
    "val": "val valid validation validate dev",
    "test": "test testing",
}
GROUPS = {
    name: group for group, names in SUBSETS.items() for name in names.split()
}  # what subsets are called
ARCHIVE = r"\.(zip|7z|rar|tgz|tbz2?|txz|gz|bz2|xz|zst|lz4)"
KINDS = {  # what else files are by their names, and what to do about them
    "unfinished downloads: complete them": r"\.(part|ytdl|crdownload|download|partial|aria2)$",
    "volumes (NIfTI, DICOM, microscopes): save the frames of each video as an .npy": r"\.(nii(\.gz)?|dcm|czi|nd2|lif)$",
    "archives: unpack them": rf"(?<!\.part\d)(?<!\.part\d\d){ARCHIVE}$",
    "parts of archives: join those of tar (cat PART* > ARCHIVE), unpack the first of 7z, rar or zip"
    " with 7z": rf"(({ARCHIVE}|\.tar)[-._]?(part)?[-._]?([a-z]{{2}}|\d{{1,3}})"
    r"|\.z\d\d|\.part\d+\.rar)$",
    "tars, which are read only where they lie in INPUT itself, not below it": r"\.tar$",
    "TIFF files: save a stack as an .npy, or its frames as numbered .png files in a folder": r"\.tiff?$",
    "pictures: convert animated ones to .mp4; numbered frames lie in a folder of their"
    " own": r"\.(jpe?g|png|apng|bmp|webp|heic|heif|avif)$",
    "arrays: save the frames of each video as an .npy": r"\.(npz|h5|hdf5|mat|pkl|pickle|pt|zarr)$",
    "raw frames: give them a header (ffmpeg -s WIDTHxHEIGHT -i IN.yuv OUT.y4m)": r"\.(yuv|rgb)$",
    "playlists of streams: save each as a file (ffmpeg -i PLAYLIST -c copy VIDEO.mp4)": r"\.(m3u8|mpd)$",
    TABLES: r"\.(csv|tsv|txt|json|jsonl|ndjson|xlsx?|xml)$",
    PARQUET: r"\.parquet$",
}


def label_folders(
    counts: Mapping[str, int], options: ListOptions, where: str
) -> dict[str, tuple[str, ...] | None]:
    """Return the labels of the videos in each folder, given how many each holds; without those of unwanted subsets.
    Classes are the first folders that differ, below train, val and test; one that holds all is no class. Raise
    InputError if none of several subsets is wanted, or the folders are hardly classes and nobody says so."""
    paths = {folder: folder.split("/") if folder else [] for folder in counts}
    depth, unwanted, subset_depth = 0, set[str](), None
    while paths and all(len(parts) > depth for parts in paths.values()):
        groups = {parts[depth]: GROUPS.get(parts[depth].lower()) for parts in paths.values()}
        if all(groups.values()) and subset_depth is None:
            unwanted, subset_depth = choose_subset(groups, options.subset, where), depth
        elif len(groups) > 1:
            break
        depth += 1
    inner = {folder: parts[depth] for folder, parts in paths.items() if len(parts) > depth}
    classes = {folder: name for folder, name in inner.items() if not PART.fullmatch(name)}
    if options.label == FOLDER:
        classes = {folder: parts[-1] for folder, parts in paths.items() if parts}
    elif (
        options.unlabeled
        or len({*classes.values()}) < 2
        or _are_unclear(classes, counts, options, where)
    ):
        classes = {}
    return {
        folder: (classes[folder],) if folder in classes else None
        for folder, parts in paths.items()
        if subset_depth is None or parts[subset_depth] not in unwanted
    }


def _are_unclear(
    classes: dict[str, str], counts: Mapping[str, int], options: ListOptions, where: str
) -> bool:
    """Whether folders are hardly classes; raise InputError if so, unless these are none then."""
    videos = dict.fromkeys(sorted({*classes.values()}), 0)
    for folder, name in classes.items():
        videos[name] += counts[folder]
    names = ", ".join(map(printable, [*videos][:NUM_NAMED]))
    fix = "give --unlabeled, or --label-column folder if the folder of a file is its class"
    if not PLACES.isdisjoint(map(str.lower, videos)):
        problem = f"not all folders in {where} are classes ({names}): {fix}, or one of the folders as INPUT"
    elif {*videos.values()} == {1}:
        problem = (
            f"each of the {len(videos)} folders in {where} holds a single video ({names}): {fix}"
        )
    else:
        return False
    if options.asks:
        raise InputError(problem)
    return True


def choose_subset(groups: Mapping[str, str | None], subset: str | None, where: str) -> set[str]:
    """Return the subsets, by name with their usual one, that are not wanted. Raise InputError if none of several is."""
    names = ", ".join(sorted(groups))
    if len(groups) > 1 and subset is None:
        raise InputError(
            f"{where} has several subsets, {names}: give --subset NAME, or --subset all"
        )
    if subset in (None, "all") or not groups:
        return set()
    if subset not in groups.values() and subset not in groups:
        raise InputError(f"{where} has no subset {subset}, only {names}: choose one of them")
    return {name for name, group in groups.items() if subset not in (name, group)}


def walk_folders(folder: Path, skipped: Skipped) -> Iterator[tuple[str, list[str]]]:
    """Yield all folders (as "" or "run/"), each once, with the names of their files; hidden ones are skipped."""
    seen: set[tuple[int, int]] = set()
    for parent, inner, files in os.walk(folder, followlinks=True, onerror=_refuse_unlistable):
        prefix = "" if parent == str(folder) else os.path.relpath(parent, folder) + "/"
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:  # through a link that leads back up
            skipped.add("folders that were seen under another name", prefix.rstrip("/"))
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        for name in filter(is_hidden, inner):
            skipped.add(HIDDEN, f"{prefix}{name}/")
        inner[:] = sorted(name for name in inner if not is_hidden(name))
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
    """Yield the videos below a folder in object storage."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found: dict[str, dict[str, Any]] = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    for path, details in found.items():
        name = PurePosixPath(path).relative_to(PurePosixPath(folder)).as_posix()
        parts = name.split("/")
        if kind := HIDDEN if any(map(is_hidden, parts)) else classify_name(parts[-1]):
            skipped.add(kind, name)
            continue
        problem = (
            "its name holds ::, which stands for an archive in URLs: rename it"
            if "::" in name
            else None
        )
        yield Item(
            name, filesystem.unstrip_protocol(path), None, int(details.get("size") or 0), problem
        )


def find_lerobot_sets(folder: Path) -> list[Path]:
    """List the data sets of LeRobot: the folder itself, or those in it."""
    found = (
        [folder / LEROBOT] if (folder / LEROBOT).is_file() else sorted(folder.glob(f"*/{LEROBOT}"))
    )
    return [info.parent.parent for info in found if b"codebase_version" in info.read_bytes()]


def list_episodes(folder: Path, where: Path) -> Iterator[Item]:
    """Yield the episodes of a data set of version 2 (a file each) or 3 (several a file), named relative to `where`."""
    try:
        info = json.loads((folder / LEROBOT).read_text(encoding="utf-8"))
        cameras = [
            name for name, feature in info["features"].items() if feature["dtype"] == "video"
        ]
        for episode in _read_episodes(folder):
            index = episode["episode_index"]
            place = {"episode_index": index, "episode_chunk": index // info["chunks_size"]}
            for camera in cameras:
                start = f"videos/{camera}/"
                said = {
                    name.removeprefix(start): value
                    for name, value in episode.items()
                    if name.startswith(start)
                }
                path = folder / info["video_path"].format(video_key=camera, **place, **said)
                fields = {"episode": index, "camera": camera}
                fields |= {name: episode[name] for name in ("tasks", "length") if name in episode}
                segment = ""
                if "from_timestamp" in said:
                    segment = str(Segment(said["from_timestamp"], said["to_timestamp"]))
                item = make_item(path.relative_to(where).as_posix(), path)
                yield msgspec.structs.replace(
                    item, segment=segment, fields=json.dumps(fields, ensure_ascii=False)
                )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = (
            f"{folder} is a data set of LeRobot, and its tables in meta/ cannot be read ({error!r})"
        )
        raise InputError(f"{what}: give the folder videos/ in it, with --unlabeled") from error


def _read_episodes(folder: Path) -> Iterator[dict[str, Any]]:
    if tables := sorted(folder.glob("meta/episodes/**/*.parquet")):
        for table in tables:
            file = import_pyarrow(str(table)).ParquetFile(table)
            columns = [
                name for name in file.schema_arrow.names if not name.startswith("stats/")
            ]  # most of its bytes
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
        return
    with (folder / "meta/episodes.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, filter(str.strip, lines))


def is_frame_folder(folder: str | Path) -> bool:
    """Whether a folder holds numbered pictures, the frames of a video."""
    return any(PICTURE.fullmatch(entry.name) for entry in islice(os.scandir(folder), NUM_LOOKED_AT))


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def classify_name(name: str) -> str | None:
    """Return the kind under which a file of this name is skipped; None for a video."""
    if is_hidden(name):
        return HIDDEN
    if has_video_extension(name):
        return None
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)),
        UNKNOWN,
    )


def has_video_extension(name: str) -> bool:
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name


def _refuse_unlistable(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be listed ({error.strerror}): make it readable, or move it"
    ) from error


def make_item(source: str, path: Path) -> Item:
    return Item(source, str(path.absolute()), None, *examine(path))


def examine(path: Path) -> tuple[int, str | None]:
    """Return the bytes of a file, and why it can be no video."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            return 0, f"it is {kind}, not a video file"
        return (
            (status.st_size, None) if os.access(path, os.R_OK) else (0, "no permission to read it")
        )
    except ValueError:
        return 0, "no file can have its name"
    except (FileNotFoundError, NotADirectoryError):
        return (
            0,
            "it is a link to a file that does not exist"
            if path.is_symlink()
            else "there is no such file",
        )
    except OSError as error:
        return 0, f"it cannot be read ({error.strerror})"

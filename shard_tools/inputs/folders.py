"""Videos in folders, here or in object storage."""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from common.errors import InputError
from common.logging import printable
from shard_tools.encoding.source import PICTURE, VIDEO_EXTENSIONS, may_be_video
from shard_tools.inputs.item import HIDDEN, UNKNOWN, Item, Skipped, is_hidden
from shard_tools.inputs.options import FOLDER, ListOptions

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FRAME_FOLDERS = "folders of frames beside videos"
TABLES = "tables and texts: give a list of videos itself as INPUT"
NUM_LOOKED_AT = 100  # entries of a folder
PART = re.compile(  # of video2dataset and others; days, cameras, recordings
    r"\d{5,}|\d{4}[-_.]\d\d[-_.]\d\d.*|(part|chunk|shard|batch|cam|camera|view|session|rec|recording|episode)[-_]?\d+",
    re.IGNORECASE,
)
PLACES = set("video videos clip clips data raw full media files frames images mp4 downloads".split())  # of all classes
NO_PERMISSION = "no permission to read it"
NUM_NAMED = 5  # folders in a sentence
GROUPS = {  # what subsets are called
    "train": "train", "training": "train", "trainset": "train",
    "val": "val", "valid": "val", "validation": "val", "validate": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


ARCHIVE = r"\.(zip|7z|rar|tgz|tbz2?|txz|gz|bz2|xz|zst|lz4)"
KINDS = {  # what else files are by their names, and what to do about them
    "unfinished downloads: complete them": r"\.(part|ytdl|crdownload|download|partial|aria2)$",
    "volumes (NIfTI, DICOM, microscopes): save the frames of each video as an .npy": r"\.(nii(\.gz)?|dcm|czi|nd2|lif)$",
    "archives: unpack them": rf"(?<!\.part\d)(?<!\.part\d\d){ARCHIVE}$",
    "parts of archives: join those of tar (cat PART* > ARCHIVE), unpack the first of 7z, rar or zip with 7z":
        rf"(({ARCHIVE}|\.tar)[-._]?(part)?[-._]?([a-z]{{2}}|\d{{1,3}})|\.z\d\d|\.part\d+\.rar)$",
    "tars, which are read only where they lie in INPUT itself, not below it": r"\.tar$",
    "TIFF files: save a stack as an .npy, or its frames as numbered .png files in a folder": r"\.tiff?$",
    "pictures: convert animated ones to .mp4; numbered frames lie in a folder of their own":
        r"\.(jpe?g|png|apng|bmp|webp|heic|heif|avif)$",
    "arrays: save the frames of each video as an .npy": r"\.(npz|h5|hdf5|mat|pkl|pickle|pt|zarr)$",
    "raw frames: give them a header (ffmpeg -s WIDTHxHEIGHT -i IN.yuv OUT.y4m)": r"\.(yuv|rgb)$",
    "playlists of streams: save each as a file (ffmpeg -i PLAYLIST -c copy VIDEO.mp4)": r"\.(m3u8|mpd)$",
    TABLES: r"\.(csv|tsv|txt|json|jsonl|ndjson|parquet|xlsx?|xml)$",
}  # fmt: skip


def label_folders(counts: Mapping[str, int], options: ListOptions, where: str) -> dict[str, tuple[str, ...] | None]:
    """Return the labels of the videos in each folder, given how many each holds; without those of unwanted subsets.

    Classes are the first folders that differ, below train, val and test; one that holds all is no class. Raise
    InputError if none of several subsets is wanted, or the folders are hardly classes and nobody says so.
    """
    paths = {folder: folder.split("/") if folder else [] for folder in counts}
    depth, unwanted, subset_depth = 0, set[str](), None
    while paths and all(len(parts) > depth for parts in paths.values()):
        groups = {parts[depth]: GROUPS.get(parts[depth].lower()) for parts in paths.values()}
        if all(groups.values()) and subset_depth is None:
            unwanted, subset_depth = choose_subset(groups, options.subset, where), depth
        elif len(groups) > 1:
            break
        depth += 1
    classes = {folder: parts[depth] for folder, parts in paths.items() if len(parts) > depth}
    classes = {folder: name for folder, name in classes.items() if not PART.fullmatch(name)}
    if options.label == FOLDER:
        classes = {folder: parts[-1] for folder, parts in paths.items() if parts}
    elif options.unlabeled or len({*classes.values()}) < 2 or _are_unclear(classes, counts, options, where):
        classes = {}
    return {
        folder: (classes[folder],) if folder in classes else None
        for folder, parts in paths.items()
        if subset_depth is None or parts[subset_depth] not in unwanted
    }


def _are_unclear(classes: dict[str, str], counts: Mapping[str, int], options: ListOptions, where: str) -> bool:
    """Whether folders are hardly classes; raise InputError if so, unless these are none then."""
    videos = dict.fromkeys(sorted({*classes.values()}), 0)
    for folder, name in classes.items():
        videos[name] += counts[folder]
    names = ", ".join(map(printable, [*videos][:NUM_NAMED]))
    fix = "give --unlabeled, or --label-column folder if the folder of a file is its class"
    if not PLACES.isdisjoint(map(str.lower, videos)):
        problem = f"not all folders in {where} are classes ({names}): {fix}, or one of the folders as INPUT"
    elif {*videos.values()} == {1}:
        problem = f"each of the {len(videos)} folders in {where} holds a single video ({names}): {fix}"
    else:
        return False
    if options.asks:
        raise InputError(problem)
    return True


def choose_subset(groups: Mapping[str, str | None], subset: str | None, where: str) -> set[str]:
    """Return the folders, by name with their usual one, that are not of the wanted subset.

    Raise InputError if none of several is wanted.
    """
    names = ", ".join(sorted(groups))
    if len(groups) > 1 and subset is None:
        raise InputError(
            f"the folders {names} in {where} are subsets, not classes: choose with --subset NAME, or --subset all"
        )
    if subset in (None, "all"):
        return set()
    if subset not in groups.values() and subset not in groups:
        raise InputError(f"{where} has no subset {subset}, only {names}: choose one of them")
    return {name for name, group in groups.items() if subset not in (name, group)}


def walk_folders(folder: Path, skipped: Skipped | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield all folders (as "" or "run/") with the names of their files, but no hidden ones, and each once; count the
    others."""
    seen: set[tuple[int, int]] = set()
    skip = skipped.add if skipped is not None else lambda *_: None
    for parent, inner, files in os.walk(folder, followlinks=True, onerror=_refuse_unlistable):
        prefix = "" if parent == str(folder) else os.path.relpath(parent, folder) + "/"
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:  # through a link that leads back up
            skip("folders that were seen under another name", prefix.rstrip("/"))
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        for name in filter(is_hidden, inner):
            skip(HIDDEN, f"{prefix}{name}/")
        inner[:] = sorted(name for name in inner if not is_hidden(name))
        yield prefix, files


def list_folder(folder: Path, skipped: Skipped) -> Iterator[Item]:
    """Yield the videos below `folder`.

    Tars that lie in `folder` itself are neither yielded nor skipped: the caller decides.
    """
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


def list_frame_folders(folder: Path) -> Iterator[Item]:
    for prefix, _ in walk_folders(folder):
        if prefix and is_frame_folder(folder / prefix):
            yield Item(prefix.rstrip("/"), os.path.abspath(folder / prefix))


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
        problem = "its name holds ::, which stands for an archive in URLs: rename it" if "::" in name else None
        yield Item(name, filesystem.unstrip_protocol(path), None, int(details.get("size") or 0), problem)


def is_frame_folder(folder: str | Path) -> bool:
    """Whether a folder holds numbered pictures, the frames of a video."""
    return any(PICTURE.fullmatch(entry.name) for entry in islice(os.scandir(folder), NUM_LOOKED_AT))


def count_frames(folder: Path) -> int:
    return sum(PICTURE.fullmatch(entry.name) is not None for entry in os.scandir(folder))


def classify_name(name: str) -> str | None:
    """Return the kind under which a file of this name is skipped; None for a video."""
    if is_hidden(name):
        return HIDDEN
    if has_video_extension(name):
        return None
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), UNKNOWN)


def is_named_video(name: str) -> bool:
    return has_video_extension(name) and not is_hidden(name.rpartition("/")[2])


def has_video_extension(name: str) -> bool:
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name


def _refuse_unlistable(error: OSError) -> None:
    fix = "make it readable, or move it away"
    raise InputError(f"{error.filename} cannot be listed ({error.strerror}): {fix}") from error


def make_item(source: str, path: Path) -> Item:
    """Return the file at `path` as an item, with the reason if it cannot be a video."""
    size, problem = 0, None
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            problem = f"it is {kind}, not a video file"
        elif not os.access(path, os.R_OK):
            problem = NO_PERMISSION
    except ValueError:
        problem = "no file can have its name"
    except (FileNotFoundError, NotADirectoryError):
        problem = "it is a link to a file that does not exist" if path.is_symlink() else "there is no such file"
    except PermissionError:
        problem = NO_PERMISSION
    except OSError as error:
        problem = f"it cannot be read ({error.strerror})"
    return Item(source, str(path.absolute()), None, 0 if problem else size, problem)

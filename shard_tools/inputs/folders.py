"""Videos in folders, here or in object storage."""

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

import fsspec

from common.errors import InputError
from shard_tools.encoding.frames import PICTURE
from shard_tools.encoding.source import VIDEO_EXTENSIONS, may_be_video
from shard_tools.inputs.item import HIDDEN, UNKNOWN, Item, Skipped, is_hidden

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FRAME_FOLDERS = "folders of frames beside videos"
NUM_LOOKED_AT = 100  # entries of a folder
PART = re.compile(r"\d{5,}|(part|chunk|shard|batch)[-_]?\d+", re.IGNORECASE)  # of video2dataset and others
GROUPS = {  # what subsets are called
    "train": "train", "training": "train", "trainset": "train",
    "val": "val", "valid": "val", "validation": "val", "validate": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def walk_folders(folder: Path, skipped: Skipped | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield all folders with the names of their files, but no hidden ones, and each once; count the others."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_unlistable):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()  # a link that leads back up
            if skipped is not None:
                skipped.add("folders that were seen under another name", os.path.relpath(parent, folder))
            continue
        seen.add((status.st_dev, status.st_ino))
        for name in filter(is_hidden, folders):
            if skipped is not None:
                skipped.add(HIDDEN, os.path.relpath(os.path.join(parent, name), folder) + "/")
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        yield parent, files


def list_folder(folder: Path, skipped: Skipped, subset: str | None = None) -> Iterator[Item]:
    """Yield the videos below `folder`; the first sub-folder's name is the label.

    Folders called train, val and test are subsets, and one that holds all others is no class. Tars that lie in `folder`
    itself are neither yielded nor skipped: the caller decides.
    """
    depth, others = _find_classes(folder, subset)
    for parent, files in walk_folders(folder, skipped):
        relative_parent = os.path.relpath(parent, folder)
        if relative_parent.split("/")[0] in others:
            continue
        prefix = "" if relative_parent == "." else f"{relative_parent}/"
        if prefix and is_frame_folder(parent):
            skipped.add(FRAME_FOLDERS, relative_parent)
            files = [name for name in files if not name.lower().endswith(PICTURES)]
        for name in files:
            kind = classify_name(name)
            if kind is None or (kind == UNKNOWN and may_be_video(Path(parent, name))):
                yield make_item(prefix + name, Path(parent, name), name_class(prefix + name, depth))
            elif kind == HIDDEN or not name.endswith(".tar") or prefix:
                skipped.add(kind, prefix + name)


def list_frame_folders(folder: Path, subset: str | None = None) -> Iterator[Item]:
    """Yield the folders of frames below `folder`, labeled as videos are."""
    depth, others = _find_classes(folder, subset)
    for parent, _ in walk_folders(folder):
        source = os.path.relpath(parent, folder)
        if source != "." and source.split("/")[0] not in others and is_frame_folder(parent):
            yield Item(source, os.path.abspath(parent), name_class(source, depth))


def _find_classes(folder: Path, subset: str | None) -> tuple[int, set[str]]:
    """Return how many folders deep those of the classes lie, and the folders of other subsets."""
    depth, others = 0, set[str]()
    while True:
        entries = [entry for entry in os.scandir(folder) if not is_hidden(entry.name)]
        names = {entry.name for entry in entries if entry.is_dir()}
        if len(names) < len([e for e in entries if e.is_dir() or classify_name(e.name) is None]) or not names:
            return depth, others
        groups = {name: GROUPS.get(name.lower()) for name in names}
        if all(groups.values()) and not others:
            others = choose_subset(groups, subset, str(folder)) if depth == 0 or len(names) == 1 else set()
        elif len(names) > 1 or not any(entry.is_dir() for entry in os.scandir(folder / min(names))):
            return depth, others
        depth += 1
        folder /= min(names - others)


def find_class_depth(names: Iterable[str], subset: str | None, where: str) -> tuple[int, set[str]]:
    """Return the same of a list of paths."""
    paths = [name.split("/") for name in names]
    depth, others = 0, set[str]()
    while paths and all(len(parts) > depth + 1 for parts in paths):
        groups = {parts[depth]: GROUPS.get(parts[depth].lower()) for parts in paths}
        if all(groups.values()) and not others:
            others = choose_subset(groups, subset, where)
        elif len(groups) > 1 or not all(len(parts) > depth + 2 for parts in paths):
            break
        depth += 1
    return depth, others


def choose_subset(groups: Mapping[str, str | None], subset: str | None, where: str) -> set[str]:
    """Return the folders that are not of the wanted subset. Raise InputError if none of several is wanted."""
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


def name_class(path: str, depth: int) -> tuple[str] | None:
    """Return the class of a video by its path: the folder below `depth` others, unless it is a number of a part."""
    parts = path.split("/")
    if len(parts) < depth + 2 or PART.fullmatch(parts[depth]):
        return None
    return (parts[depth],)


def is_frame_folder(folder: str | Path) -> bool:
    """Whether a folder holds numbered pictures, the frames of a video."""
    return any(PICTURE.fullmatch(entry.name) for entry in islice(os.scandir(folder), NUM_LOOKED_AT))


def count_frames(folder: Path) -> int:
    return sum(PICTURE.fullmatch(entry.name) is not None for entry in os.scandir(folder))


def classify_name(name: str) -> str | None:
    """Return the kind under which a file of this name is skipped; None for a video."""
    if is_hidden(name):
        return HIDDEN
    return None if has_video_extension(name) else UNKNOWN


def has_video_extension(name: str) -> bool:
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name


def _refuse_unlistable(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be listed ({error.strerror}): make it readable, or move it away"
    ) from error


def make_item(source: str, path: Path, labels: tuple[str, ...] | None) -> Item:
    """Return the file at `path` as an item, with the reason if it cannot be a video."""
    location = str(path.absolute())
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        return Item(source, location, labels, problem=_explain_missing(path, error))
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
        return Item(source, location, labels, problem=f"it is {kind}, not a video file")
    if not os.access(path, os.R_OK):
        return Item(source, location, labels, problem="no permission to read it")
    return Item(source, location, labels, size=status.st_size)


def _explain_missing(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "no file can have its name"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "it is a link to a file that does not exist" if os.path.islink(path) else "there is no such file"
    reasons = {
        errno.ENAMETOOLONG: "its name is longer than a file's may be",
        errno.ELOOP: "it is a link to itself",
        errno.EACCES: "no permission to read it",
    }
    return reasons.get(error.errno or 0, f"it cannot be read ({error.strerror})")


def list_url(url: str, skipped: Skipped, subset: str | None = None) -> Iterator[Item]:
    """Yield the videos below a folder in object storage, labeled like those of a local one."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    names = [str(PurePosixPath(path).relative_to(PurePosixPath(folder))) for path in found]
    depth, others = find_class_depth((name for name in names if classify_name(name) is None), subset, url)
    for path, status in found.items():
        relative = PurePosixPath(path).relative_to(PurePosixPath(folder))
        if relative.parts[0] in others:
            continue
        kind = HIDDEN if any(map(is_hidden, relative.parts)) else classify_name(relative.name)
        if kind:
            skipped.add(kind, str(relative))
            continue
        size = int(status.get("size") or 0)
        problem = "its name holds ::, which stands for an archive in URLs: rename it" if "::" in str(relative) else None
        yield Item(str(relative), filesystem.unstrip_protocol(path), name_class(str(relative), depth), size, problem)

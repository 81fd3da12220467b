"""Videos in folders, here or in object storage."""

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
    """Yield the videos below `folder`, labeled by their folders.

    Tars that lie in `folder` itself are neither yielded nor skipped: the caller decides.
    """
    holding = (_relative(parent, folder) for parent, files in walk_folders(folder) if any(map(is_named_video, files)))
    classes = FolderClasses.find(holding, subset, str(folder))
    for parent, files in walk_folders(folder, skipped):
        relative = _relative(parent, folder)
        if classes.excludes(relative):
            continue
        prefix = relative and f"{relative}/"
        if prefix and is_frame_folder(parent):
            skipped.add(FRAME_FOLDERS, relative)
            files = [name for name in files if not name.lower().endswith(PICTURES)]
        for name in files:
            kind = classify_name(name)
            if kind is None or (kind == UNKNOWN and may_be_video(Path(parent, name))):
                yield make_item(prefix + name, Path(parent, name), classes.name(relative))
            elif kind == HIDDEN or not name.endswith(".tar") or prefix:
                skipped.add(kind, prefix + name)


def list_frame_folders(folder: Path, subset: str | None = None) -> Iterator[Item]:
    """Yield the folders of frames below `folder`, labeled as videos are."""
    found = [_relative(parent, folder) for parent, _ in walk_folders(folder) if is_frame_folder(parent)]
    classes = FolderClasses.find(found, subset, str(folder))
    for source in filter(None, found):
        if not classes.excludes(source):
            yield Item(source, os.path.abspath(folder / source), classes.name(_parent(source)))


def list_url(url: str, skipped: Skipped, subset: str | None = None) -> Iterator[Item]:
    """Yield the videos below a folder in object storage, labeled like those of a local one."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    names = {path: str(PurePosixPath(path).relative_to(PurePosixPath(folder))) for path in found}
    classes = FolderClasses.find((_parent(name) for name in names.values() if is_named_video(name)), subset, url)
    for path, name in names.items():
        if classes.excludes(name):
            continue
        kind = HIDDEN if any(map(is_hidden, name.split("/"))) else classify_name(name.rpartition("/")[2])
        if kind:
            skipped.add(kind, name)
            continue
        size = int(found[path].get("size") or 0)
        problem = "its name holds ::, which stands for an archive in URLs: rename it" if "::" in name else None
        yield Item(name, filesystem.unstrip_protocol(path), classes.name(_parent(name)), size, problem)


def _relative(path: str, folder: Path) -> str:
    relative = os.path.relpath(path, folder)
    return "" if relative == "." else relative


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class FolderClasses(NamedTuple):
    """Which folders are classes: those `depth` folders deep; below the `others` lie subsets that are not wanted."""

    depth: int
    others: frozenset[str]

    @classmethod
    def find(cls, folders: Iterable[str], subset: str | None, where: str) -> "FolderClasses":
        """Choose by the folders that hold videos: train, val and test are subsets, one that holds all is no class.

        Raise InputError if there are several subsets and none of them is wanted.
        """
        paths = [folder.split("/") if folder else [] for folder in set(folders)]
        depth, others = 0, frozenset[str]()
        while paths and all(len(parts) > depth for parts in paths):
            groups = {parts[depth]: GROUPS.get(parts[depth].lower()) for parts in paths}
            if all(groups.values()) and not others:
                unwanted = choose_subset(groups, subset, where)
                others = frozenset("/".join(parts[: depth + 1]) for parts in paths if parts[depth] in unwanted)
                paths = [parts for parts in paths if parts[depth] not in unwanted]
            elif len(groups) > 1 or not all(len(parts) > depth + 1 for parts in paths):
                break
            depth += 1
        return cls(depth, others)

    def excludes(self, path: str) -> bool:
        return any(path == other or path.startswith(f"{other}/") for other in self.others)

    def name(self, folder: str) -> tuple[str] | None:
        """Return the class of the videos in a folder, unless it is the number of a part."""
        parts = folder.split("/")
        if not folder or len(parts) <= self.depth or PART.fullmatch(parts[self.depth]):
            return None
        return (parts[self.depth],)


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


def is_named_video(name: str) -> bool:
    return has_video_extension(name) and not is_hidden(name.rpartition("/")[2])


def holds_videos(folder: Path) -> bool:
    return any(is_named_video(name) for _, files in walk_folders(folder) for name in files)


def has_video_extension(name: str) -> bool:
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name


def _refuse_unlistable(error: OSError) -> None:
    fix = "make it readable, or move it away"
    raise InputError(f"{error.filename} cannot be listed ({error.strerror}): {fix}") from error


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
    return "no permission to read it" if error.errno == errno.EACCES else f"it cannot be read ({error.strerror})"

"""Videos in folders, here or in object storage."""

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import fsspec

from common.errors import InputError
from common.logging import printable
from shard_tools.encoding.frames import PICTURE
from shard_tools.encoding.source import VIDEO_EXTENSIONS, may_be_video
from shard_tools.inputs.item import HIDDEN, UNKNOWN, Item, Skipped, is_hidden
from shard_tools.inputs.options import FOLDER, ListOptions

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FRAME_FOLDERS = "folders of frames beside videos"
NUM_LOOKED_AT = 100  # entries of a folder
PART = re.compile(  # of video2dataset and others; days, cameras, recordings
    r"\d{5,}|\d{4}[-_.]\d\d[-_.]\d\d.*|(part|chunk|shard|batch|cam|camera|view|session|rec|recording|episode)[-_]?\d+",
    re.IGNORECASE,
)
PLACES = set("video videos clip clips data raw full media files frames images mp4 downloads".split())  # of all classes
EACH = -1  # depth of the folder of each file
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
    "tables and texts: give a list of videos itself as INPUT": r"\.(csv|tsv|txt|json|jsonl|ndjson|parquet|xlsx?|xml)$",
}  # fmt: skip


class FolderClasses(NamedTuple):
    """Which folders are classes: those `depth` folders deep; below the `others` lie subsets that are not wanted."""

    depth: int | None  # None: none is; EACH: each video's own
    others: frozenset[str]
    problem: str = ""  # why they are hardly classes, unless somebody says so

    @classmethod
    def find(cls, folders: Iterable[str], options: ListOptions, where: str) -> "FolderClasses":
        """Choose by the folders of all videos: train, val and test are subsets, one that holds all is no class.

        `folders` are those of each video. Raise InputError if none of several subsets is wanted.
        """
        counts = Counter(folders)
        paths = [folder.split("/") if folder else [] for folder in counts]
        depth, others = 0, frozenset[str]()
        while paths and all(len(parts) > depth for parts in paths):
            groups = {parts[depth]: GROUPS.get(parts[depth].lower()) for parts in paths}
            if all(groups.values()) and not others:
                unwanted = choose_subset(groups, options.subset, where)
                others = frozenset("/".join(parts[: depth + 1]) for parts in paths if parts[depth] in unwanted)
            elif len(groups) > 1:
                break
            depth += 1
        if options.unlabeled or options.label == FOLDER:
            return cls(None if options.unlabeled else EACH, others)
        videos = Counter[str]()
        for folder, number in counts.items():
            if folder and len(parts := folder.split("/")) > depth and not PART.fullmatch(parts[depth]):
                videos[parts[depth]] += number
        names = ", ".join(map(printable, sorted(videos)[:NUM_NAMED]))
        fix = "give --unlabeled, or --label-column folder if the folder of a file is its class"
        problem = ""
        if not PLACES.isdisjoint(map(str.lower, videos)):
            problem = f"not all folders in {where} are classes ({names}): {fix}, or one of the folders as INPUT"
        elif set(videos.values()) == {1}:
            problem = f"each of the {len(videos)} folders in {where} holds a single video ({names}): {fix}"
        is_none = len(videos) < 2 or (problem and not options.asks)
        return cls(None, others) if is_none else cls(depth, others, problem)

    def excludes(self, path: str) -> bool:
        return any(path == other or path.startswith(f"{other}/") for other in self.others)

    def name(self, folder: str) -> tuple[str] | None:
        """Return the class of the videos in a folder, unless it is a part's number. Raise InputError if in doubt."""
        if self.problem:
            raise InputError(self.problem)
        parts = folder.split("/")
        if self.depth is None or not folder or len(parts) <= self.depth:
            return None
        return None if self.depth != EACH and PART.fullmatch(parts[self.depth]) else (parts[self.depth],)


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
    """Yield all folders with the names of their files, but no hidden ones, and each once; count the others."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_unlistable):
        status = os.stat(parent)
        is_seen = (status.st_dev, status.st_ino) in seen  # through a link that leads back up
        if skipped is not None and is_seen:
            skipped.add("folders that were seen under another name", _relative(parent, folder))
        for name in filter(is_hidden, folders if skipped is not None and not is_seen else ()):
            skipped.add(HIDDEN, _relative(os.path.join(parent, name), folder) + "/")  # type: ignore[union-attr]
        folders[:] = [] if is_seen else sorted(name for name in folders if not is_hidden(name))
        seen.add((status.st_dev, status.st_ino))
        if not is_seen:
            yield parent, files


def list_folder(folder: Path, skipped: Skipped, options: ListOptions) -> Iterator[Item]:
    """Yield the videos below `folder`, labeled by their folders.

    Tars that lie in `folder` itself are neither yielded nor skipped: the caller decides.
    """
    videos = (parent for parent, files in walk_folders(folder) for name in files if is_named_video(name))
    classes = FolderClasses.find((_relative(parent, folder) for parent in videos), options, str(folder))
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


def list_frame_folders(folder: Path, options: ListOptions) -> Iterator[Item]:
    """Yield the folders of frames below `folder`, labeled as videos are."""
    found = [_relative(parent, folder) for parent, _ in walk_folders(folder) if is_frame_folder(parent)]
    classes = FolderClasses.find((source.rpartition("/")[0] for source in found), options, str(folder))
    for source in filter(None, found):
        if not classes.excludes(source):
            yield Item(source, os.path.abspath(folder / source), classes.name(source.rpartition("/")[0]))


def list_url(url: str, skipped: Skipped, options: ListOptions) -> Iterator[Item]:
    """Yield the videos below a folder in object storage, labeled like those of a local one."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    names = {path: str(PurePosixPath(path).relative_to(PurePosixPath(folder))) for path in found}
    shown = (name for name in names.values() if not any(map(is_hidden, name.split("/"))))
    holding = (name.rpartition("/")[0] for name in shown if is_named_video(name))
    classes = FolderClasses.find(holding, options, url)
    for path, name in names.items():
        if classes.excludes(name):
            continue
        folders, _, base = name.rpartition("/")
        if kind := HIDDEN if any(map(is_hidden, name.split("/"))) else classify_name(base):
            skipped.add(kind, name)
            continue
        size = int(found[path].get("size") or 0)
        problem = "its name holds ::, which stands for an archive in URLs: rename it" if "::" in name else None
        yield Item(name, filesystem.unstrip_protocol(path), classes.name(folders), size, problem)


def _relative(path: str, folder: Path) -> str:
    relative = os.path.relpath(path, folder)
    return "" if relative == "." else relative


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


def make_item(source: str, path: Path, labels: tuple[str, ...] | None) -> Item:
    """Return the file at `path` as an item, with the reason if it cannot be a video."""
    location, problem, size = str(path.absolute()), None, 0
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            problem = f"it is {kind}, not a video file"
        elif not os.access(path, os.R_OK):
            problem = "no permission to read it"
    except ValueError:
        problem = "no file can have its name"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            problem = "it is a link to a file that does not exist" if path.is_symlink() else "there is no such file"
        else:
            problem = (
                "no permission to read it" if error.errno == errno.EACCES else f"it cannot be read ({error.strerror})"
            )
    return Item(source, location, labels, 0 if problem else size, problem)

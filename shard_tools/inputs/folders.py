"""Videos in folders, here or in object storage."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import fsspec

from common.errors import InputError
from shard_tools.encoding.source import VIDEO_EXTENSIONS, may_be_video
from shard_tools.inputs.item import HIDDEN, UNKNOWN, Item, Skipped, is_hidden, one_label


def list_folder(folder: Path, skipped: Skipped) -> Iterator[Item]:
    """Yield the videos below `folder`; the first sub-folder's name is the label.

    Tars that lie in `folder` itself are neither yielded nor skipped: the caller decides.
    """
    seen: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_unlistable):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()  # a link that leads back up
            skipped.add("folders that were seen under another name", os.path.relpath(parent, folder))
            continue
        seen.add((status.st_dev, status.st_ino))
        for name in filter(is_hidden, folders):
            skipped.add(HIDDEN, os.path.relpath(os.path.join(parent, name), folder) + "/")
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in files:
            path = Path(parent, name)
            relative = path.relative_to(folder)
            kind = classify_name(name)
            if kind is None or (kind == UNKNOWN and may_be_video(path)):
                yield make_item(relative.as_posix(), path, relative.parts[0] if len(relative.parts) > 1 else None)
            elif kind == HIDDEN or not name.endswith(".tar") or len(relative.parts) > 1:
                skipped.add(kind, relative.as_posix())


def classify_name(name: str) -> str | None:
    """Return the kind under which a file of this name is skipped; None for a video."""
    if is_hidden(name):
        return HIDDEN
    return None if name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name else UNKNOWN


def _refuse_unlistable(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be listed ({error.strerror}): make it readable, or move it away"
    ) from error


def make_item(source: str, path: Path, label: str | None) -> Item:
    """Return the file at `path` as an item, with the reason if it cannot be a video."""
    location, labels = str(path.absolute()), one_label(label)
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


def list_url(url: str, skipped: Skipped) -> Iterator[Item]:
    """Yield the videos below a folder in object storage, labeled like those of a local one."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    for path, status in found.items():
        relative = PurePosixPath(path).relative_to(PurePosixPath(folder))
        kind = HIDDEN if any(map(is_hidden, relative.parts)) else classify_name(relative.name)
        if kind:
            skipped.add(kind, str(relative))
            continue
        label = relative.parts[0] if len(relative.parts) > 1 else None
        size = int(status.get("size") or 0)
        problem = "its name holds ::, which stands for an archive in URLs: rename it" if "::" in str(relative) else None
        yield Item(str(relative), filesystem.unstrip_protocol(path), one_label(label), size, problem)

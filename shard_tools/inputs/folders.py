"""Videos in folders, here or in an object store."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import fsspec

from common.errors import InputError
from shard_tools.encoding.source import VIDEO_EXTENSIONS
from shard_tools.inputs.item import HIDDEN, UNKNOWN, Item, Skipped, is_hidden


def from_folder(folder: Path, skipped: Skipped) -> Iterator[Item]:
    """Videos below `folder`; those in a sub-folder have the first sub-folder's name as label.

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
        is_top = Path(parent) == folder
        for name in filter(is_hidden, folders):
            skipped.add(HIDDEN, os.path.relpath(os.path.join(parent, name), folder) + "/")
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in files:
            path = Path(parent, name)
            relative = path.relative_to(folder)
            if kind := skipped_as(name):
                if not (is_top and name.endswith(".tar") and kind == UNKNOWN):
                    skipped.add(kind, relative.as_posix())
                continue
            yield local_item(relative.as_posix(), path, relative.parts[0] if len(relative.parts) > 1 else None)


def skipped_as(name: str) -> str | None:
    """The kind under which a file of this name is passed over; None for a video."""
    if is_hidden(name):
        return HIDDEN
    return None if name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and "." in name else UNKNOWN


def _refuse_unlistable(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be listed ({error.strerror}): make it readable, or move it away"
    ) from error


def local_item(source: str, path: Path, label: str | None) -> Item:
    """The file at `path`, or the reason why it cannot be one of the videos."""
    location = str(path.absolute())
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        return Item(source, location, label, problem=_why_not_there(path, error))
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
        return Item(source, location, label, problem=f"it is {kind}, not a video file")
    if not os.access(path, os.R_OK):
        return Item(source, location, label, problem="permission to read it is missing")
    return Item(source, location, label, size=status.st_size)


def _why_not_there(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "its name is none that a file can have"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "it is a link to a file that does not exist" if os.path.islink(path) else "there is no such file"
    reasons = {
        errno.ENAMETOOLONG: "its name is longer than a file's may be",
        errno.ELOOP: "it is a link that leads to itself",
        errno.EACCES: "permission to read it is missing",
    }
    return reasons.get(error.errno or 0, f"it cannot be read ({error.strerror})")


def from_url(url: str, skipped: Skipped) -> list[Item]:
    """Videos below a folder of an object store, labelled as those of a local one."""
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    items = []
    for path, status in found.items():
        relative = PurePosixPath(path).relative_to(PurePosixPath(folder))
        kind = HIDDEN if any(map(is_hidden, relative.parts)) else skipped_as(relative.name)
        if kind:
            skipped.add(kind, str(relative))
            continue
        label = relative.parts[0] if len(relative.parts) > 1 else None
        size = int(status.get("size") or 0)
        problem = "its name holds ::, which stands for an archive in URLs: rename it" if "::" in str(relative) else None
        items.append(Item(str(relative), filesystem.unstrip_protocol(path), label, size, problem))
    return items

"""Find the file that a list means: lists omit extensions and folders, and write names as another system did."""

import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.errors import InputError
from shard_tools.inputs.folders import has_video_extension, is_frame_folder, walk_folders
from shard_tools.inputs.item import is_hidden
from shard_tools.inputs.sniff import to_text
from shard_tools.temp_table import TempTable

OMITTED_EXTENSIONS = ("mp4", "webm", "mkv", "avi", "mov")
MAX_NAMED = 3  # files of one name in a sentence


class File(NamedTuple):
    """A video file, or a folder of frames, as `root` / path."""

    path: str
    size: int
    is_folder: bool


class Finder:
    """Looks names up below `root`: as they are, with an extension, and, once it is indexed, wherever they lie."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.absolute = str(root.absolute())
        self._prefix = os.path.join(root, "")
        self._extensions = list(OMITTED_EXTENSIONS)
        self._index: TempTable | None = None

    def find(self, name: str) -> File | None:
        found = self._find_name(name)
        if found is None and not name.isascii() and (text := to_text(name)) != name:  # the list is not UTF-8
            found = self._find_name(text)
        return found

    def _find_name(self, name: str) -> File | None:
        found = self._look_at(name)
        if found is None and not has_video_extension(name):
            for place, extension in enumerate(self._extensions):
                if found := self._look_at(f"{name}.{extension}"):
                    if place:  # the next one most likely has the same
                        self._extensions.insert(0, self._extensions.pop(place))
                    break
        if found is None and self._index is not None:
            matches = self._look_up(name)
            found = self._look_at(matches[0]) if len(matches) == 1 else None
        return found

    def _look_at(self, name: str) -> File | None:
        path = self._prefix + name if name[:1] != "/" else name
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return None
        if stat.S_ISREG(status.st_mode):
            return File(name, status.st_size, False)
        is_folder = stat.S_ISDIR(status.st_mode) and is_frame_folder(path)
        return File(name.rstrip("/"), 0, True) if is_folder else None

    def index(self) -> None:
        """Walk all of `root`: from now on names are found without their folders, extension, case and normal form."""
        if self._index is None:
            self._index = TempTable("CREATE TABLE files (name BLOB, path BLOB)")
            self._index.insert("files", self._walk(), 2)
            self._index.run("CREATE INDEX by_name ON files (name)")

    def _walk(self) -> Iterator[tuple[str, str]]:
        for folder, files in walk_folders(self.root):
            relative = os.path.relpath(folder, self.root)
            prefix = "" if relative == "." else f"{relative}/"
            videos = [name for name in files if has_video_extension(name) and not is_hidden(name)]
            yield from ((_normalize(name)[-1], prefix + name) for name in videos)
            if not videos and prefix and is_frame_folder(folder):
                yield _normalize(relative)[-1], relative

    def _look_up(self, name: str) -> list[str]:
        """List the files that `name` may mean: its folders must be the last of theirs, or theirs the last of its."""
        if self._index is None or not name.strip("/\\"):
            return []
        wanted = _normalize(name)
        rows = self._index.run("SELECT path FROM files WHERE name = ?", wanted[-1])
        found = []
        for (path,) in rows:
            parts = _normalize(path)
            length = min(len(parts), len(wanted))
            if parts[-length:] == wanted[-length:]:
                found.append((path, len(parts) == length))
        exact = [path for path, _ in found if path.endswith(name)]
        return exact if len(exact) == 1 else [path for path, _ in found]

    def explain(self, name: str) -> str | None:
        """Say why a name is not found, if several files have it."""
        matches = self._look_up(name)
        if len(matches) < 2:
            return None
        return f"{len(matches)} files may be meant by it: {', '.join(sorted(matches)[:MAX_NAMED])}"


def _normalize(name: str) -> list[str]:
    """Return the parts of a path without the extension and whatever systems write differently."""
    if has_video_extension(name):
        name = name.rpartition(".")[0]
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    return name.replace("\\", "/").strip("/").removeprefix("./").casefold().split("/")


def relative_to_root(path: str, root: Path) -> str:
    """Return a path as names of sources write it: relative to the root, if it lies below."""
    if path[:1] == "/":
        relative = os.path.relpath(path, root)
        return path if relative.startswith("..") else relative
    return PurePosixPath(path).as_posix() if "./" in path or "//" in path else path


def require_folder(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"--root {root} is no folder: give the one that the list's paths are relative to")

"""Find the file that a list means: lists omit extensions and folders, and write names as another system did."""

import os
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

from adamae.pipeline.reading.storage import is_remote
from adamae.shard_tools.inputs import folders
from adamae.shard_tools.inputs.cells import to_text
from adamae.shard_tools.inputs.folders import has_video_extension, is_frame_folder, is_hidden
from adamae.shard_tools.inputs.item import Skipped
from adamae.shard_tools.temp_table import TempTable

OMITTED_EXTENSIONS = ("", ".mp4", ".webm", ".mkv", ".avi", ".mov")
# yt-dlp names a download "title [id].mp4", and youtube-dl "title-id.mp4".
DOWNLOAD = re.compile(r".*(?:\[([^\[\]]+)\]|-([\w-]{11}))\.\w+", re.DOTALL)
MAX_NAMED = 3  # files of one name in a sentence


class Finder:
    """Looks names up below `root`: as they are, with an extension, and, once it is indexed, wherever they lie; returns
    paths relative to it, or absolute. Folders are listed rather than asked about each file."""

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root, self.suffix = root, suffix
        self.absolute = str(root.absolute())
        self.finds_urls = True  # by their last part: they were downloaded
        self._index: TempTable | None = None
        self._list = lru_cache(1024)(self._list_folder)  # about 100 bytes a name

    def find(self, name: str) -> str | None:
        """Return the path of the video file, or folder of frames, that a list means by a name."""
        if self.finds_urls and is_remote(name):
            name = name.partition("?")[0].rpartition("/")[2]
        for extension in OMITTED_EXTENSIONS[: 1 if has_video_extension(name) else None]:
            if found := self._look_at(name + extension):
                return found
        matches = self._look_up(name)
        if len(matches) == 1:
            return self._look_at(matches[0])
        text = name if name.isascii() else to_text(name)  # the list may not be UTF-8
        return self.find(text) if text != name else None

    def has(self, name: str) -> bool:
        """Whether there is a video of this name, which may lack the suffix."""
        return bool(name) and self.find(name + self.suffix) is not None

    def count_frames(self, name: str) -> int:
        """Count the frames in a folder of this name; 0 if there is none."""
        found = self.find(name)
        if not found or not (folder := self.root / found).is_dir():
            return 0
        return sum(
            folders.PICTURE.fullmatch(entry.name) is not None for entry in os.scandir(folder)
        )

    def locate(self, path: str) -> tuple[str, str]:
        """Return the name of the source, relative to the root if it lies below, and the absolute path."""
        if path[0] != "/":
            return PurePosixPath(path).as_posix(), f"{self.absolute}/{path}"
        relative = os.path.relpath(path, self.root)
        return path if relative.startswith("..") else relative, path

    def _look_at(self, name: str) -> str | None:
        name = name.rstrip("/")
        folder, slash, base = name.rpartition("/")
        is_file, path = self._list(folder + slash).get(base), os.path.join(self.root, name)
        return (
            name
            if is_file or (is_file is False and os.path.isdir(path) and is_frame_folder(path))
            else None
        )

    def _list_folder(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder, and whether they are files."""
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                return {entry.name: entry.is_file() for entry in entries}
        except (OSError, ValueError):
            return {}

    def index(self) -> None:
        """Walk all of `root`: from now on names are found without their folders, extension, case and normal form."""
        self._index = TempTable("CREATE TABLE files (name TEXT, path TEXT)")
        self._index.insert("files", self._walk(), 2)
        self._index.run("CREATE INDEX by_name ON files (name)")

    def _walk(self) -> Iterator[tuple[str, str]]:
        for folder, files in folders.walk_folders(self.root, Skipped()):
            videos = [name for name in files if has_video_extension(name) and not is_hidden(name)]
            for name in videos:
                yield _normalize(name)[-1], folder + name
                if match := DOWNLOAD.fullmatch(name):
                    yield f"[{match[1] or match[2]}]", folder + name
            if not videos and folder and is_frame_folder(self.root / folder):
                yield _normalize(folder)[-1], folder.rstrip("/")

    def _look_up(self, name: str) -> list[str]:
        """List the files that `name` may mean: the folders of one must be the last folders of the other."""
        wanted = _normalize(name)
        found = []
        for path in self._get_paths(wanted[-1]):
            length = min(len(parts := _normalize(path)), len(wanted))
            if parts[-length:] == wanted[-length:]:
                found.append(path)
        exact = [path for path in found if path.endswith(name)]
        return (exact if len(exact) == 1 else found) or self._get_paths(f"[{name}]")

    def _get_paths(self, name: str) -> list[str]:
        rows = self._index.run("SELECT path FROM files WHERE name = ?", name) if self._index else ()
        return [path for (path,) in rows]

    def explain(self, name: str) -> str:
        """Say why a name is not found."""
        matches = self._look_up(name)
        if len(matches) > 1:
            return (
                f"{len(matches)} files may be meant by it: {', '.join(sorted(matches)[:MAX_NAMED])}"
            )
        return folders.examine(self.root / name)[1] or "its folder cannot be listed"


def _normalize(name: str) -> list[str]:
    """Return the parts of a path without the extension and whatever systems write differently."""
    if has_video_extension(name):
        name = name.rpartition(".")[0]
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    return name.replace("\\", "/").strip("/").removeprefix("./").casefold().split("/")

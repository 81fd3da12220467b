"""Find the file that a list means.

Lists omit extensions and folders, and write names as another system did.
"""

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from adamae.common.locations import is_remote
from adamae.shard_tools.inputs import folders
from adamae.shard_tools.inputs.cells import to_text
from adamae.shard_tools.inputs.folders import has_video_extension, is_frame_folder, is_hidden
from adamae.shard_tools.inputs.item import Skipped
from adamae.shard_tools.temp_table import TempTable

# A name without an extension is tried with each of these, in this order.
OMITTED_EXTENSIONS = ("", ".mp4", ".webm", ".mkv", ".avi", ".mov")
# yt-dlp names a download "title [id].mp4", and youtube-dl "title-id.mp4".
DOWNLOAD = re.compile(r".*(?:\[([^\[\]]+)\]|-([\w-]{11}))\.\w+", re.DOTALL)
# Files of one name that a sentence gives.
MAX_NAMED = 3
# A listed folder takes about 100 bytes a name.
MAX_LISTED_FOLDERS = 1024


class Finder:
    """Finds files below `root` by the names that lists give them.

    They are found as they are called, with an extension that the list omits, and, once `index` was
    called, wherever they lie. Paths are relative to the root, or absolute. Folders are listed
    rather than asked about each file: on network storage, that is a request instead of thousands.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root = root
        self.suffix = suffix
        self.absolute = str(root.absolute())
        # A URL means the downloaded file that is called as its last part.
        self.finds_urls = True
        self._index: TempTable | None = None
        self._list = lru_cache(MAX_LISTED_FOLDERS)(self._list_folder)

    def find(self, name: str, endings: Sequence[str] = ("",)) -> tuple[str | None, str]:
        """Return the path of the video, or folder of frames, that a list means by a name.

        The file may be called as the name with one of `endings` behind it, which is returned too;
        the first of them that a file has in the folder of the name is taken, or else in any folder.
        """
        if self.finds_urls and is_remote(name):
            name = name.partition("?")[0].rpartition("/")[2]
            match = self.find(name, endings)
            # Downloaded files have a space for %20, or keep it.
            return self.find(unquote(name), endings) if match[0] is None else match
        for search in (self._search_folder, self._search_index):
            for ending in endings:
                path = search(name + ending)
                if path is not None:
                    return path, ending
        # The list may be in Windows-1252.
        text = name if name.isascii() else to_text(name)
        return self.find(text, endings) if text != name else (None, "")

    def has(self, name: str) -> bool:
        """Return whether there is a video of this name, which may lack the suffix."""
        return bool(name) and self.find(name + self.suffix)[0] is not None

    def count_frames(self, name: str) -> int:
        """Return the number of frames in a folder of this name; 0 if there is none."""
        path, _ = self.find(name)
        if path is None:
            return 0
        folder = self.root / path
        if not folder.is_dir():
            return 0
        return sum(bool(folders.PICTURE.fullmatch(entry.name)) for entry in os.scandir(folder))

    def locate(self, path: str) -> tuple[str, str]:
        """Return the source, relative to the root if it lies below, and the absolute path."""
        if path[0] != "/":
            return PurePosixPath(path).as_posix(), f"{self.absolute}/{path}"
        relative = os.path.relpath(path, self.root)
        if relative.startswith(".."):
            return path, path
        return relative, path

    def _search_folder(self, name: str) -> str | None:
        """Return the path of a file or a folder of frames that lies where its name says."""
        name = name.rstrip("/")
        folder, slash, base = name.rpartition("/")
        entries = self._list(folder + slash)
        for extension in ("",) if has_video_extension(base) else OMITTED_EXTENSIONS:
            is_file = entries.get(base + extension)
            if is_file is None:
                continue
            path = os.path.join(self.root, name + extension)
            if is_file or (os.path.isdir(path) and is_frame_folder(path)):
                return name + extension
        return None

    def _search_index(self, name: str) -> str | None:
        """Return the path of the only file that is called so in any folder."""
        matches = self._look_up(name)
        return self._search_folder(matches[0]) if len(matches) == 1 else None

    def _list_folder(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder, and whether they are files; none if it cannot be listed."""
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                return {entry.name: entry.is_file() for entry in entries}
        except (OSError, ValueError):
            return {}

    def index(self) -> None:
        """Walk all of `root`, to find names without their folders, extension, case, normal form."""
        # A table on disk, since a collection may have 10 million files.
        self._index = TempTable("CREATE TABLE files (name TEXT, path TEXT)")
        self._index.insert("files", self._walk(), 2)
        self._index.run("CREATE INDEX by_name ON files (name)")

    def _walk(self) -> Iterator[tuple[str, str]]:
        """Yield (normalized name, path) of all videos; those of downloads also as ([id], path)."""
        for folder, files in folders.walk_folders(self.root, Skipped()):
            videos = [name for name in files if has_video_extension(name) and not is_hidden(name)]
            for name in videos:
                path = folder + name
                yield _normalize(name)[-1], path
                match = DOWNLOAD.fullmatch(name)
                if match:
                    yield f"[{match[1] or match[2]}]", path
            if folder and not videos and is_frame_folder(self.root / folder):
                yield _normalize(folder)[-1], folder.rstrip("/")

    def _look_up(self, name: str) -> list[str]:
        """Return the indexed files that `name` may mean, or else the downloads with this id.

        The folders of one must be the last folders of the other: /home/x/walk/c.mp4 means
        walk/c.mp4, and c means both walk/c.mp4 and run/c.mp4.
        """
        if self._index is None:
            return []
        parts = _normalize(name)
        download = f"[{name}]"
        query = "SELECT name, path FROM files WHERE name IN (?, ?)"
        matches = []
        downloads = []
        for key, path in self._index.run(query, parts[-1], download):
            if key == download:
                downloads.append(path)
                continue
            path_parts = _normalize(path)
            length = min(len(path_parts), len(parts))
            if path_parts[-length:] == parts[-length:]:
                matches.append(path)
        # Of a.mp4 and A.MP4, a.mp4 means the former.
        exact = [path for path in matches if path.endswith(name)]
        if len(exact) == 1:
            return exact
        return matches or downloads

    def explain(self, name: str) -> str:
        """Return the reason why a name is not found."""
        matches = self._look_up(name)
        if len(matches) > 1:
            examples = ", ".join(sorted(matches)[:MAX_NAMED])
            return f"{len(matches)} files may be meant by it: {examples}"
        _, problem = folders.examine(self.root / name)
        return problem or "its folder cannot be listed"


def _normalize(name: str) -> list[str]:
    """Return the parts of a path without the extension and what systems write differently.

    Videos\\Été.MP4 becomes ["videos", "été"], whether é is one code point or two.
    """
    if has_video_extension(name):
        name = name.rpartition(".")[0]
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    return name.replace("\\", "/").strip("/").removeprefix("./").casefold().split("/")

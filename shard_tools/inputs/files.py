"""Find the file that a list means: lists omit extensions and folders, and write names as another system did."""

import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

from pipeline.reading.storage import is_remote
from shard_tools.inputs import folders
from shard_tools.inputs.cells import to_text
from shard_tools.inputs.folders import has_video_extension, is_frame_folder
from shard_tools.temp_table import TempTable

OMITTED_EXTENSIONS = ("mp4", "webm", "mkv", "avi", "mov")
# yt-dlp names a download "title [id].mp4", and youtube-dl "title-id.mp4".
DOWNLOAD = re.compile(r".*(?:\[([^\[\]]+)\]|-([\w-]{11}))\.\w+", re.DOTALL)
MAX_NAMED = 3  # files of one name in a sentence
MAX_HELD = 2**21  # names of files in memory, about 100 bytes each
MAX_ASKED = 8  # questions about the files of a folder, after which it is listed


class Finder:
    """Looks names up below `root`: as they are, with an extension, and, once it is indexed, wherever they lie.

    Paths are relative to `root`, or absolute. Folders are listed rather than asked about each file.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root, self.suffix = root, suffix
        self.absolute = str(root.absolute())
        self.finds_urls = True  # by their last part: they were downloaded
        self.frame_folders: set[str] = set()  # among the paths that were found
        self._extensions = list(OMITTED_EXTENSIONS)
        self._index: TempTable | None = None
        self._listings: dict[str, dict[str, bool]] = {}  # names in a folder -> whether they are files
        self._num_asked: Counter[str] = Counter()
        self._num_held = 0

    def find(self, name: str) -> str | None:
        """Return the path of the video file, or folder of frames, that a list means by a name."""
        end = name.rfind("/") + 1
        if (listing := self._listings.get(name[:end])) and listing.get(name[end:]):  # most names
            return name
        if self.finds_urls and is_remote(name):
            name = name.partition("?")[0].rpartition("/")[2]
        if (found := self._look_at(name)) is not None:
            return found
        if not has_video_extension(name):
            for index, extension in enumerate(self._extensions):
                if found := self._look_at(f"{name}.{extension}"):
                    self._extensions.insert(0, self._extensions.pop(index))  # the next one most likely has the same
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
        return folders.count_frames(self.root / found) if found in self.frame_folders else 0

    def locate(self, path: str) -> tuple[str, str]:
        """Return the name of the source, relative to the root if it lies below, and the absolute path."""
        if path[0] != "/":
            location = f"{self.absolute}/{path}"
            return PurePosixPath(path).as_posix() if "./" in path or "//" in path else path, location
        relative = os.path.relpath(path, self.root)
        return path if relative.startswith("..") else relative, path

    def _look_at(self, name: str) -> str | None:
        end = name.rfind("/") + 1
        listing, base = self._list(name[:end]), name[end:]
        if listing is not None and base not in ("", ".", ".."):
            if base not in listing:
                return None
            if listing[base]:
                return name
        path = os.path.join(self.root, name)
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            return None
        if stat.S_ISDIR(mode) and is_frame_folder(path):
            self.frame_folders.add(name := name.rstrip("/"))
            return name
        return name if stat.S_ISREG(mode) else None

    def _list(self, folder: str) -> dict[str, bool] | None:
        """List a folder that is asked about often; None if that is not worth it, or takes too much memory."""
        if folder in self._listings:
            return self._listings[folder]
        self._num_asked[folder] += 1
        if self._num_asked[folder] != MAX_ASKED or self._num_held > MAX_HELD:
            if len(self._num_asked) > MAX_HELD:
                self._num_asked.clear()
            return None
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                listing = {entry.name: entry.is_file() for entry in islice(entries, MAX_HELD)}
        except FileNotFoundError:
            listing = {}
        except (OSError, ValueError):
            return None
        self._num_held += 1 + len(listing)
        if len(listing) < MAX_HELD:
            self._listings[folder] = listing
        return self._listings.get(folder)

    def index(self) -> None:
        """Walk all of `root`: from now on names are found without their folders, extension, case and normal form."""
        self._index = TempTable("CREATE TABLE files (name TEXT, path TEXT)")
        self._index.insert("files", self._walk(), 2)
        self._index.run("CREATE INDEX by_name ON files (name)")

    def _walk(self) -> Iterator[tuple[str, str]]:
        for folder, files in folders.walk_folders(self.root):
            relative = os.path.relpath(folder, self.root)
            prefix = "" if relative == "." else f"{relative}/"
            videos = [name for name in files if folders.is_named_video(name)]
            for name in videos:
                yield _normalize(name)[-1], prefix + name
                if match := DOWNLOAD.fullmatch(name):
                    yield f"[{match[1] or match[2]}]", prefix + name
            if not videos and prefix and is_frame_folder(folder):
                yield _normalize(relative)[-1], relative

    def _look_up(self, name: str) -> list[str]:
        """List the files that `name` may mean: the folders of one must be the last folders of the other."""
        if self._index is None or not name.strip("/\\"):
            return []
        wanted = _normalize(name)
        found = []
        for (path,) in self._index.run("SELECT path FROM files WHERE name = ?", wanted[-1]):
            length = min(len(parts := _normalize(path)), len(wanted))
            if parts[-length:] == wanted[-length:]:
                found.append(path)
        if not found:
            return [path for (path,) in self._index.run("SELECT path FROM files WHERE name = ?", f"[{name}]")]
        exact = [path for path in found if path.endswith(name)]
        return exact if len(exact) == 1 else found

    def explain(self, name: str) -> str:
        """Say why a name is not found."""
        matches = self._look_up(name)
        if len(matches) > 1:
            return f"{len(matches)} files may be meant by it: {', '.join(sorted(matches)[:MAX_NAMED])}"
        return folders.make_item(name, self.root / name, None).problem or "it is a folder, not a video file"


def _normalize(name: str) -> list[str]:
    """Return the parts of a path without the extension and whatever systems write differently."""
    if has_video_extension(name):
        name = name.rpartition(".")[0]
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    return name.replace("\\", "/").strip("/").removeprefix("./").casefold().split("/")

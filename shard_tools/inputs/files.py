"""Find the file that a list means: lists omit extensions and folders, and write names as another system did."""

import os
import stat
import sys
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

from shard_tools.inputs.cells import to_text
from shard_tools.inputs.folders import (
    count_frames,
    has_video_extension,
    is_frame_folder,
    is_named_video,
    make_item,
    walk_folders,
)
from shard_tools.temp_table import TempTable

OMITTED_EXTENSIONS = ("mp4", "webm", "mkv", "avi", "mov")
MAX_NAMED = 3  # files of one name in a sentence
MAX_HELD = 2**21  # names of files in memory, about 100 bytes each
ENTRIES_PER_QUESTION = 8  # of a folder that are listed in the time of one stat
NO_NAMES = ("", ".", "..")


class Finder:
    """Looks names up below `root`: as they are, with an extension, and, once it is indexed, wherever they lie.

    Paths are relative to `root`, or absolute. Folders are listed rather than asked about each file, once there are
    enough questions to pay for it.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root, self.suffix = root, suffix
        self.absolute = str(root.absolute())
        self.frame_folders: set[str] = set()  # among the paths that were found
        self._extensions = list(OMITTED_EXTENSIONS)
        self._index: TempTable | None = None
        self._listings: dict[str, dict[str, bool]] = {}  # names in a folder -> whether they are files
        self._costs: dict[str, int] = {}  # what listing a folder takes at least, in entries
        self._budget = 0
        self._num_held = 0

    def find(self, name: str) -> str | None:
        """Return the path of the video file, or folder of frames, that a list means by a name."""
        end = name.rfind("/") + 1
        if (listing := self._listings.get(name[:end])) and listing.get(name[end:]):  # most names
            self._budget += ENTRIES_PER_QUESTION
            return name
        if (found := self._look_at(name)) is not None:
            return found
        if not has_video_extension(name):
            for place, extension in enumerate(self._extensions):
                if found := self._look_at(f"{name}.{extension}"):
                    self._extensions.insert(0, self._extensions.pop(place))  # the next one most likely has the same
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
        return count_frames(self.root / found) if found in self.frame_folders else 0

    def locate(self, path: str) -> tuple[str, str]:
        """Return the name of the source, relative to the root if it lies below, and the absolute path."""
        if path[0] != "/":
            location = f"{self.absolute}/{path}"
            return PurePosixPath(path).as_posix() if "./" in path or "//" in path else path, location
        relative = os.path.relpath(path, self.root)
        return path if relative.startswith("..") else relative, path

    def _look_at(self, name: str) -> str | None:
        is_file = self._ask_listing(name)
        if is_file is not None:
            return name if is_file else None
        path = os.path.join(self.root, name)
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            return None
        if stat.S_ISDIR(mode) and is_frame_folder(path):
            self.frame_folders.add(name := name.rstrip("/"))
            return name
        return name if stat.S_ISREG(mode) else None

    def _ask_listing(self, name: str) -> bool | None:
        """Tell whether there is such a file, if its folder is listed; None if only a look at it can tell."""
        end = name.rfind("/") + 1
        folder, base = name[:end], name[end:]
        listing = self._listings.get(folder)
        if listing is None and (listing := self._list(folder)) is None:
            return None
        self._budget += ENTRIES_PER_QUESTION
        is_file = listing.get(base)
        return is_file or (None if is_file is False or base in NO_NAMES else False)

    def _list(self, folder: str) -> dict[str, bool] | None:
        """List a folder that is asked about again, if the questions until now pay for it."""
        self._budget += ENTRIES_PER_QUESTION
        if folder not in self._costs:
            if len(self._costs) >= MAX_HELD:
                self._costs.clear()
            self._costs[folder] = self._budget + 1
            return None
        if self._budget < self._costs[folder]:
            return None
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                listing = {entry.name: entry.is_file() for entry in islice(entries, self._budget)}
        except FileNotFoundError:
            listing = {}
        except (OSError, ValueError):
            self._costs[folder] = sys.maxsize
            return None
        if len(listing) == self._budget:  # there are more
            self._costs[folder] = 2 * self._budget
            self._budget = 0
            return None
        self._budget -= len(listing)
        self._num_held += 1 + len(listing)
        if self._num_held > MAX_HELD:
            self._listings.clear()
            self._num_held = len(listing)
        self._listings[folder] = listing
        return listing

    def index(self) -> None:
        """Walk all of `root`: from now on names are found without their folders, extension, case and normal form."""
        if self._index is None:
            self._index = TempTable("CREATE TABLE files (name TEXT, path TEXT)")
            self._index.insert("files", self._walk(), 2)
            self._index.run("CREATE INDEX by_name ON files (name)")

    def _walk(self) -> Iterator[tuple[str, str]]:
        for folder, files in walk_folders(self.root):
            relative = os.path.relpath(folder, self.root)
            prefix = "" if relative == "." else f"{relative}/"
            videos = [name for name in files if is_named_video(name)]
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

    def explain(self, name: str) -> str:
        """Say why a name is not found."""
        matches = self._look_up(name)
        if len(matches) > 1:
            return f"{len(matches)} files may be meant by it: {', '.join(sorted(matches)[:MAX_NAMED])}"
        if self._ask_listing(name) is False:
            return "there is no such file"
        return make_item(name, self.root / name, None).problem or "it is a folder, not a video file"


def _normalize(name: str) -> list[str]:
    """Return the parts of a path without the extension and whatever systems write differently."""
    if has_video_extension(name):
        name = name.rpartition(".")[0]
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    return name.replace("\\", "/").strip("/").removeprefix("./").casefold().split("/")

"""Where a dataset goes: it stays in the folder that it is made in, or is uploaded to object storage shard by shard.

A remote dataset is made in a local staging folder, by the same code. A shard's tar is removed there once it is
uploaded: those that are still there remain to be uploaded, whatever became of the run that made them. `dataset.json` is
uploaded last, and is what counts; while no run is under way, the staging folder follows the remote one.
"""

import hashlib
import re
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from common.atomic_io import hash_file
from common.errors import InputError
from pipeline.reading.cache import user_cache_dir
from pipeline.reading.storage import ObjectStore
from pipeline.shards.format import (
    CARD_FILE,
    DATASET_FILE,
    PLAN_FILE,
    REJECTED_FILE,
    SKIPPED_FILE,
    DatasetInfo,
    ShardInfo,
    read_dataset_info,
)

UPLOADS, WAITING = 2, 4  # shards uploaded at a time; with those that wait for it, so many lie on the local disk
DOWNLOADS = 16  # small files at a time
TABLE = re.compile(r"(shards|samples|gops|names)-[0-9a-f]{16}\.(npy|jsonl)")


class LocalOutput(AbstractContextManager["LocalOutput"]):
    """A dataset that is made where it stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def locate(self, name: str = "") -> str:
        """Return where a file of the dataset ends up, for messages."""
        return str(self.folder / name)

    def file_size(self, name: str) -> int | None:
        """Return the bytes of a file of the dataset; None if it is not there."""
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def add_shard(self, shard: ShardInfo) -> None:
        """Take over a finished shard."""

    def publish(self, info: DatasetInfo | None) -> None:
        """Make the dataset visible: all its shards are finished. None: there are only rejects."""


class RemoteOutput(LocalOutput):
    """A dataset in object storage, and the staging folder in which it is made: a given one stays."""

    def __init__(self, url: str, staging: Path | None = None) -> None:
        """Fetch all that is there but the tars. Raise InputError if that cannot be read, or written to."""
        self.url = url.rstrip("/")
        self._is_private = staging is None
        self._store = ObjectStore(self.url)
        # Not in the cache of downloads, which evicts tars.
        parent = staging or user_cache_dir("adamae-shards", "--staging")
        super().__init__(parent / hashlib.sha256(self.url.encode()).hexdigest()[:16] / self.url.rsplit("/", 1)[1])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made ({error.strerror}): give another --staging") from error
        self._threads = ThreadPoolExecutor(UPLOADS, "upload")
        self._uploads: deque[Future[None]] = deque()
        self._sizes = self._store.sizes()
        self._store.write(".writable", b"yes")  # a refusal is better found now than after the first shard
        self._store.remove(".writable")
        if not (self.folder / PLAN_FILE).exists():  # else an interrupted run has it here
            self._fetch()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=kind is not None)
        if kind is None:
            self._wait()
            if self._is_private:
                shutil.rmtree(self.folder.parent)

    def locate(self, name: str = "") -> str:
        return f"{self.url}/{name}".rstrip("/")

    def file_size(self, name: str) -> int | None:
        return self._sizes.get(name)

    def add_shard(self, shard: ShardInfo) -> None:
        """Upload a shard in the background; block while too many wait. Raise InputError if an earlier one failed."""
        self._wait(WAITING - 1)
        self._uploads.append(self._threads.submit(self._upload_shard, shard))

    def publish(self, info: DatasetInfo | None) -> None:
        """Upload what is still here, `dataset.json` last, and remove the tables that it no longer names."""
        if info is None:
            self._upload(REJECTED_FILE)
            self._upload(SKIPPED_FILE)
            return
        for shard in info.shards:
            if (self.folder / shard.name).exists():  # of another part, or of a run that was killed
                self.add_shard(shard)
        self._wait()
        self._sizes = self._store.sizes()
        for shard in info.shards:
            if self.file_size(shard.name) != shard.num_bytes:
                where = self.locate(shard.name)
                raise InputError(f"{where} is missing or incomplete: restore it, or start again without {self.folder}")
        tables = [table.file for table in info.tables.values()]
        for name in (*tables, REJECTED_FILE, SKIPPED_FILE, CARD_FILE, DATASET_FILE):
            self._upload(name)
        for name in self._sizes.keys() - tables:
            if TABLE.fullmatch(name):
                self._store.remove(name)

    def _wait(self, num_left: int = 0) -> None:
        """Wait until at most `num_left` uploads have not ended. Raise InputError if one failed."""
        while len(self._uploads) > num_left:
            self._uploads.popleft().result()

    def _upload_shard(self, shard: ShardInfo) -> None:
        tar = self.folder / shard.name
        try:
            for name in (shard.samples_name, shard.name):
                self._upload(name)
        except (InputError, FileNotFoundError):
            if tar.exists():  # else another part, which ended last, was faster
                raise
        tar.unlink(missing_ok=True)

    def _upload(self, name: str) -> None:
        path = self.folder / name
        size = path.stat().st_size
        try:
            self._store.upload(path, name)
            if (there := self._store.size(name)) != size:
                raise InputError(f"{self.locate(name)} has {there} bytes after uploading {size}")
        except InputError as error:
            raise InputError(f"{error}; run the same command again to resume") from error
        self._sizes[name] = size

    def _fetch(self) -> None:
        """Download what adding to a dataset needs."""
        for name in (REJECTED_FILE, DATASET_FILE):
            if name in self._sizes:
                self._store.download(name, self.folder / name)
            else:
                (self.folder / name).unlink(missing_ok=True)
        if DATASET_FILE in self._sizes:
            info = read_dataset_info(self.folder, lambda table: self._fetch_file(table.file, table.sha256))
            with ThreadPoolExecutor(DOWNLOADS, "download") as threads:
                list(threads.map(lambda it: self._fetch_file(it.samples_name, it.samples_sha256), info.shards))

    def _fetch_file(self, name: str, sha256: str) -> Path:
        path = self.folder / name
        if not (path.is_file() and hash_file(path) == sha256):
            self._store.download(name, path)
            if hash_file(path) != sha256:
                raise InputError(f"{self.locate(name)} is not the file that {DATASET_FILE} describes: restore it")
        return path

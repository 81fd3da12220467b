"""Where a dataset goes: it stays in the folder that it is made in, or is uploaded to a store shard by shard.

A dataset in a store is made in a folder of this machine, by the same code. A shard's tar is removed there once it is in
the store: those that are still there are to be uploaded yet, whatever became of the run that made them. `dataset.json`
is uploaded last of all, and is what counts; where nothing is under way, the folder follows the store.
"""

import hashlib
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore

from common.atomic_io import hash_file
from common.errors import InputError
from pipeline.reading.cache import user_cache_dir
from pipeline.reading.storage import ObjectStore
from pipeline.shards.format import DATASET_FILE, REJECTED_FILE, DatasetInfo, ShardInfo, TableInfo, read_dataset_info

WORK_FOLDER = ".work"
UPLOADS, WAITING = 2, 4  # shards at a time, and with those that wait for their turn: so many lie on the disk
DOWNLOADS = 16  # small files at a time
TABLE = re.compile(r"(shards|samples|groups|names)-[0-9a-f]{16}\.(npy|jsonl)")
GOES_ON = "the same command goes on from there"


class LocalOutput:
    """A dataset that is made where it stays. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "LocalOutput":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    def place_of(self, name: str = "") -> str:
        """Where a file of the dataset ends up, as people call it."""
        return str(self.folder / name)

    def size_of(self, name: str) -> int | None:
        """Bytes of a file that the dataset holds; None if it is not there."""
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def send(self, shard: ShardInfo) -> None:
        """A shard is whole."""

    def publish(self, info: DatasetInfo | None) -> None:
        """All shards are whole, and `info` describes them; None if there are none, but `rejected.jsonl`."""


class RemoteOutput(LocalOutput):
    """A dataset in a store, and the folder of this machine in which it is made; removed at the end if it is ours."""

    def __init__(self, url: str, staging: Path | None = None) -> None:
        """Have here what is there, but for the tars. Raises InputError if that cannot be read, or not be written to."""
        self.url = url.rstrip("/")
        self._is_ours = staging is None
        self._bucket = ObjectStore(self.url)
        # Not in the cache of downloads, which makes room by removing tars.
        within = user_cache_dir("adamae-shards", "--staging") if staging is None else staging
        super().__init__(within / hashlib.sha256(self.url.encode()).hexdigest()[:16] / self.url.rsplit("/", 1)[1])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made ({error.strerror}): give another --staging") from error
        self._threads = ThreadPoolExecutor(UPLOADS, "upload")
        self._room = BoundedSemaphore(WAITING)
        self._uploads: list[Future[None]] = []
        self._sizes = self._bucket.sizes()
        self._refuse_read_only()
        if not (self.folder / WORK_FOLDER / "plan.json").exists():  # else an interrupted run has it here
            self._fetch()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=kind is not None)
        if kind is None:
            self._wait()
            if self._is_ours:
                shutil.rmtree(self.folder.parent)

    def place_of(self, name: str = "") -> str:
        return f"{self.url}/{name}".rstrip("/")

    def size_of(self, name: str) -> int | None:
        return self._sizes.get(name)

    def send(self, shard: ShardInfo) -> None:
        """Upload a shard beside what goes on; waits where the store is slower. Raises InputError if an earlier one
        could not be uploaded."""
        self._room.acquire()
        for upload in [upload for upload in self._uploads if upload.done()]:
            self._uploads.remove(upload)
            upload.result()
        upload = self._threads.submit(self._upload_shard, shard)
        upload.add_done_callback(lambda _: self._room.release())
        self._uploads.append(upload)

    def publish(self, info: DatasetInfo | None) -> None:
        """Upload what is here yet, `dataset.json` last, and remove the tables that it no longer names."""
        self._wait()
        if info is None:
            self._upload(REJECTED_FILE)
            return
        here = {path.name for path in self.folder.glob("*.tar")}  # of other parts, or of a run that was killed
        for shard in info.shards:
            if shard.name in here:
                self.send(shard)
        self._wait()
        self._sizes = self._bucket.sizes()
        for shard in info.shards:
            if self.size_of(shard.name) != shard.num_bytes:
                where = self.place_of(shard.name)
                raise InputError(
                    f"{where} is missing or not whole: put it back, or remove {self.folder} and start again"
                )
        tables = [table.file for table in info.tables.values()]
        for name in (*tables, REJECTED_FILE):
            self._upload(name)
        self._upload(DATASET_FILE)
        for name in [name for name in self._sizes if TABLE.fullmatch(name) and name not in tables]:
            self._bucket.remove(name)
            del self._sizes[name]

    def _wait(self) -> None:
        """Until all that was sent is there. Raises InputError if something could not be uploaded."""
        while self._uploads:
            self._uploads.pop().result()

    def _upload_shard(self, shard: ShardInfo) -> None:
        tar = self.folder / shard.name
        try:
            for name in (shard.samples_name, shard.index_name, shard.name):
                self._upload(name)
        except (InputError, FileNotFoundError):
            if tar.exists():  # else another part, which ended last, was faster
                raise
        tar.unlink(missing_ok=True)

    def _upload(self, name: str) -> None:
        path = self.folder / name
        size = path.stat().st_size
        try:
            self._bucket.replace(path, name)
            there = self._bucket.size(name)
        except InputError as error:
            raise InputError(f"{error}; {GOES_ON}") from error
        if there != size:
            raise InputError(f"{self.place_of(name)} has {there} bytes, and {size} were uploaded; {GOES_ON}")
        self._sizes[name] = size

    def _refuse_read_only(self) -> None:
        """Find out before the first video is read, not after the first shard is made."""
        self._bucket.write(".writable", b"yes")
        self._bucket.remove(".writable")

    def _fetch(self) -> None:
        """What adding to a dataset needs of it."""
        for name in (REJECTED_FILE, DATASET_FILE):
            if name in self._sizes:
                self._bucket.download(name, self.folder / name)
            else:
                (self.folder / name).unlink(missing_ok=True)
        if DATASET_FILE in self._sizes:
            info = read_dataset_info(self.folder, self._table)
            with ThreadPoolExecutor(DOWNLOADS, "download") as threads:
                for _ in threads.map(self._beside, info.shards):
                    pass

    def _table(self, table: TableInfo) -> Path:
        return self._have(table.file, table.sha256)

    def _beside(self, shard: ShardInfo) -> None:
        """The files beside a tar."""
        self._have(shard.index_name, shard.index_sha256)
        self._have(shard.samples_name, shard.samples_sha256)

    def _have(self, name: str, sha256: str) -> Path:
        """`sha256` is empty where it is not known."""
        path = self.folder / name
        if not (sha256 and path.is_file() and hash_file(path) == sha256):
            self._bucket.download(name, path)
            if sha256 and hash_file(path) != sha256:
                raise InputError(f"{self.place_of(name)} is not the one that {DATASET_FILE} describes: put it back")
        return path

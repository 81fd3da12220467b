"""A run in an object store (`run=s3://…`, whatever fsspec knows): a folder on this machine, copied there as it grows.

A checkpoint counts there when its train_state.json does, which is uploaded last.
"""

import hashlib
import os
import shutil
import socket
import sys
from pathlib import Path
from uuid import uuid4

from common.atomic_io import sync
from common.errors import InputError
from common.logging import log
from pipeline.reading.cache import user_cache_dir
from pipeline.reading.storage import ObjectStore, is_remote
from training import checkpoint
from training.lease import Lease
from training.manifest import FILE as MANIFEST
from training.manifest import Manifest

BEST = "checkpoints/best"
LOGS = ("config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html")


def staging(url: str) -> Path:
    """The folder on this machine of a run in a store."""
    url = url.rstrip("/")
    return user_cache_dir() / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[1]


def local_run(path: str) -> Path:
    """What a command reads that is given a run: `path`, or a copy of what the store at this URL holds now."""
    if not is_remote(path):
        return Path(path)
    here = staging(path)
    copy = here.parent / "read" / here.name  # the run's own folder on this machine may be in use
    if (copy / "config.yaml").exists() and ObjectStore(path).read("config.yaml") != (copy / "config.yaml").read_bytes():
        shutil.rmtree(copy)
    RemoteRun(path, copy).fetch()
    return copy


class RemoteRun:
    """Keeps a run folder of this machine and the same folder in a store alike."""

    def __init__(self, url: str, local: Path) -> None:
        self.url, self.local = url, local
        self._bucket = ObjectStore(url)
        self._lease: Lease | None = None
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of each file when it was uploaded

    def _name(self) -> str:
        """What this machine's folder calls itself; the same after a kill, which need not be waited for then."""
        file = self.local / ".holder"
        if not file.exists():
            self.local.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid4().hex, encoding="ascii")
        return file.read_text(encoding="ascii")

    def hold(self) -> None:
        """Raises InputError if another job is training there."""
        self._lease = Lease(self._bucket, self._name())
        self._lease.take()

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def fetch(self) -> None:
        """Have what is there here: the newest whole checkpoint and its logs, unless a newer one is here already."""
        names = self._bucket.names()
        here = [checkpoint.step_of(folder.name) or 0 for folder in checkpoint.whole(self.local / "checkpoints")]
        if here:
            self._refuse_another_run(names)
        is_behind = self._fetch_newest(names, max(here, default=0)) or not here
        for name in names:
            is_log = name in LOGS or name.startswith(f"{BEST}/")
            if is_log and (is_behind or not (self.local / name).exists()):
                self._bucket.download(name, self.local / name)

    def sync(self, keep: int | None = None) -> None:
        """Upload what is new here; then remove all but the newest `keep` checkpoints there. Raises TakenOverError."""
        if self._lease is not None:
            self._lease.check()
        for file in self._logs():
            self._send(file)
        there = self._steps_there(self._bucket.names("checkpoints"))
        for folder in checkpoint.whole(self.local / "checkpoints"):
            step = checkpoint.step_of(folder.name) or 0
            if step > max(there, default=0):
                for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST):  # it counts with its last
                    self._send(file)
            if step in there and (mark := folder / checkpoint.REVIEWED).exists():
                self._send(mark)
        if keep is not None:
            self._remove_old(keep)

    def _fetch_newest(self, names: list[str], newest_here: int) -> bool:
        """Whether there was a whole checkpoint newer than that, which is here now."""
        in_folders = sorted({name.split("/")[1] for name in names if name.startswith("checkpoints/step-")})
        steps = sorted((step, name) for name in in_folders if (step := checkpoint.step_of(name)) is not None)
        for step, name in reversed(steps):
            if step <= newest_here:
                return False
            try:
                self._fetch_checkpoint(name, f"checkpoints/{name}/{checkpoint.REVIEWED}" in names)
                return True
            except ValueError as error:
                log(f"{self.url}/checkpoints/{name} is not whole ({error}), and is skipped", file=sys.stderr)
        return False

    def _fetch_checkpoint(self, name: str, is_reviewed: bool) -> None:
        """Raises ValueError if it is not whole."""
        data = self._bucket.read(f"checkpoints/{name}/{MANIFEST}")
        if data is None:
            raise ValueError("it has no train_state.json")
        manifest = Manifest.parse(data)
        aside = self.local / "checkpoints" / f".{name}.{socket.gethostname()}-{os.getpid()}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            for file in manifest.sha256:
                if self._bucket.names(f"checkpoints/{name}/{file}") == []:
                    raise ValueError(f"{file} is missing")
                self._bucket.download(f"checkpoints/{name}/{file}", aside / file)
            checkpoint.verify(aside, manifest)
            if is_reviewed:
                (aside / checkpoint.REVIEWED).touch()
            (aside / MANIFEST).write_bytes(data)
            sync(aside / MANIFEST)
            sync(aside)
            final = self.local / "checkpoints" / name
            try:
                os.replace(aside, final)
            except OSError:
                if not final.is_dir():  # another process of this machine was faster
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _refuse_another_run(self, names: list[str]) -> None:
        ours = self.local / "config.yaml"
        theirs = self._bucket.read("config.yaml") if "config.yaml" in names else None
        if not ours.exists() or theirs != ours.read_bytes():
            what = "is empty" if theirs is None else "holds another run"
            raise InputError(
                f"{self.url} {what}, and {self.local} keeps what was trained there: remove that, or move it"
            )

    def _logs(self) -> list[Path]:
        files = [self.local / name for name in LOGS]
        folders = (self.local / "tensorboard", self.local / BEST, self.local / "profile")
        return [f for f in (*files, *(f for folder in folders for f in sorted(folder.rglob("*")))) if f.is_file()]

    def _send(self, file: Path) -> None:
        state = file.stat()
        name, version = self._path(file), (state.st_size, state.st_mtime_ns)
        if self._sent.get(name) == version:
            return
        if name == "metrics.jsonl":  # another thread may be in the middle of a line
            self._bucket.write(name, file.read_bytes().rpartition(b"\n")[0] + b"\n")
        else:
            self._bucket.upload(file, name)
        self._sent[name] = version

    def _remove_old(self, keep: int) -> None:
        names = self._bucket.names("checkpoints")
        kept = self._steps_there(names)[-keep:]
        for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):  # without its first, it does not count
            step = checkpoint.step_of(name.split("/")[1])
            if step is not None and kept and step < kept[0]:
                self._bucket.remove(name)

    def _steps_there(self, names: list[str]) -> list[int]:
        """Of the whole checkpoints of a listing, oldest first."""
        steps = (checkpoint.step_of(name.split("/")[1]) for name in names if name.endswith(f"/{MANIFEST}"))
        return sorted(step for step in steps if step is not None)

    def _path(self, file: Path) -> str:
        return file.relative_to(self.local).as_posix()

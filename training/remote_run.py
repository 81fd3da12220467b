"""A run in object storage (`run=s3://…`, whatever fsspec knows): a folder on this node, uploaded as it grows.

A checkpoint there counts when its train_state.json does, which is uploaded last.
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
from training.checkpoint import STATE_FILE, Manifest, complete_checkpoints, parse_step, verify_files
from training.lease import Lease

BEST = "checkpoints/best"
LOGS = ("config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html")


def staging(url: str) -> Path:
    """Return the folder on this node of a run in object storage."""
    url = url.rstrip("/")
    return user_cache_dir() / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[1]


def local_run(path: str) -> Path:
    """Return what a command reads that is given a run: `path`, or a copy of what is at this URL now."""
    if not is_remote(path):
        return Path(path)
    copy = _copy_of(path)
    if (copy / "config.yaml").exists() and ObjectStore(path).read("config.yaml") != (copy / "config.yaml").read_bytes():
        shutil.rmtree(copy)
    RemoteRun(path, copy).fetch()
    return copy


def fetch_config(url: str) -> Path | None:
    """Return a folder with the config.yaml of a run that has checkpoints; None if there is no such run yet."""
    storage, copy = ObjectStore(url), _copy_of(url)
    if not any(name.endswith(f"/{STATE_FILE}") for name in storage.names("checkpoints")):
        return None
    storage.download("config.yaml", copy / "config.yaml")
    return copy


def _copy_of(url: str) -> Path:
    here = staging(url)
    return here.parent / "read" / here.name  # the run's own folder on this node may be in use


class RemoteRun:
    """Keeps a run's folder on this node and the same folder in object storage alike."""

    def __init__(self, url: str, local: Path) -> None:
        self.url, self.local = url, local
        self._storage = ObjectStore(url)
        self._lease: Lease | None = None
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of each file when it was uploaded

    def hold(self) -> None:
        """Take the lease; raise InputError if another job is training there."""
        # The same after a kill, whose lease need not be waited for then.
        holder = self.local / ".holder"
        if not holder.exists():
            holder.write_text(uuid4().hex, encoding="ascii")
        self._lease = Lease(self._storage, holder.read_text(encoding="ascii"))
        self._lease.take()

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def fetch(self) -> None:
        """Download the newest complete checkpoint and the logs, unless a newer one is here already."""
        names = self._storage.names()
        here = [parse_step(folder.name) or 0 for folder in complete_checkpoints(self.local / "checkpoints")]
        if here:
            self._refuse_another_run(names)
        is_behind = self._fetch_newest(names, max(here, default=0)) or not here
        for name in names:
            is_log = name in LOGS or name.startswith(f"{BEST}/")
            if is_log and (is_behind or not (self.local / name).exists()):
                self._storage.download(name, self.local / name)

    def sync(self, keep: int | None = None) -> None:
        """Upload what is new here; then remove all but the newest `keep` checkpoints there. Raise TakenOverError."""
        if self._lease is not None:
            self._lease.check()
        files = [self.local / name for name in LOGS]
        for folder in ("tensorboard", BEST, "profile"):
            files += sorted((self.local / folder).rglob("*"))
        for file in files:
            if file.is_file():
                self._send(file)
        newest_there = max(_complete_steps(self._storage.names("checkpoints")), default=0)
        for checkpoint in complete_checkpoints(self.local / "checkpoints"):
            if (parse_step(checkpoint.name) or 0) > newest_there:
                for file in sorted(checkpoint.iterdir(), key=lambda file: file.name == STATE_FILE):
                    self._send(file)
        if keep is not None:
            self._remove_old(keep)

    def _fetch_newest(self, names: list[str], newest_here: int) -> bool:
        """Download the newest complete checkpoint if it is newer than `newest_here`; whether there was one."""
        folders = {name.split("/")[1] for name in names if name.startswith("checkpoints/step-")}
        for name in sorted((name for name in folders if parse_step(name)), key=parse_step, reverse=True):  # type: ignore[arg-type]
            if (parse_step(name) or 0) <= newest_here:
                return False
            try:
                self._fetch_checkpoint(name)
                return True
            except ValueError as error:
                log(f"skipping {self.url}/checkpoints/{name}, which is not complete ({error})", file=sys.stderr)
        return False

    def _fetch_checkpoint(self, name: str) -> None:
        """Raise ValueError if it is not complete."""
        data = self._storage.read(f"checkpoints/{name}/{STATE_FILE}")
        if data is None:
            raise ValueError(f"{STATE_FILE} is missing")
        manifest = Manifest.parse(data)
        partial = self.local / "checkpoints" / f".{name}.{socket.gethostname()}-{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            for file in manifest.sha256:
                if self._storage.names(f"checkpoints/{name}/{file}") == []:
                    raise ValueError(f"{file} is missing")
                self._storage.download(f"checkpoints/{name}/{file}", partial / file)
            verify_files(partial, manifest)
            (partial / STATE_FILE).write_bytes(data)
            sync(partial / STATE_FILE)
            sync(partial)
            final = self.local / "checkpoints" / name
            try:
                os.replace(partial, final)
            except OSError:
                if not final.is_dir():  # another process of this node was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _refuse_another_run(self, names: list[str]) -> None:
        ours = self.local / "config.yaml"
        theirs = self._storage.read("config.yaml") if "config.yaml" in names else None
        if not ours.exists() or theirs != ours.read_bytes():
            what = "is empty" if theirs is None else "holds another run"
            raise InputError(f"{self.url} {what}, and {self.local} keeps what was trained there: remove it, or move it")

    def _send(self, file: Path) -> None:
        status = file.stat()
        name, version = file.relative_to(self.local).as_posix(), (status.st_size, status.st_mtime_ns)
        if self._sent.get(name) == version:
            return
        if name == "metrics.jsonl":  # another thread may be in the middle of a line
            self._storage.write(name, file.read_bytes().rpartition(b"\n")[0] + b"\n")
        else:
            self._storage.upload(file, name)
        self._sent[name] = version

    def _remove_old(self, keep: int) -> None:
        names = self._storage.names("checkpoints")
        kept = _complete_steps(names)[-keep:]
        # Without train_state.json, which goes first, the other files do not count.
        for name in sorted(names, key=lambda name: not name.endswith(STATE_FILE)):
            step = parse_step(name.split("/")[1])
            if step is not None and kept and step < kept[0]:
                self._storage.remove(name)


def _complete_steps(names: list[str]) -> list[int]:
    """Return the steps of the complete checkpoints in a listing, ascending."""
    steps = (parse_step(name.split("/")[1]) for name in names if name.endswith(f"/{STATE_FILE}"))
    return sorted(step for step in steps if step is not None)

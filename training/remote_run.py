"""A run in object storage (`run=s3://…`, whatever fsspec knows): a folder on this node, uploaded as it grows.

A checkpoint there counts when its train_state.json does, which is uploaded last. A lease keeps two jobs from writing to
the same run.
"""

import hashlib
import itertools
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from uuid import uuid4

from common.atomic_io import atomic_folder
from common.errors import InputError
from common.logging import log
from model.weights.hub import find_model
from pipeline.reading.cache import user_cache_dir
from pipeline.reading.storage import ObjectStore, is_remote
from training.checkpoint import STATE_FILE, Manifest, describe_fault, list_checkpoints, parse_step, verify_files

BEST = "checkpoints/best"
LOGS = ("config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html")
LEASES = "leases"
RENEW_S = 10.0
LEASE_TIMEOUT_S = 40.0  # after which a lease that nobody has renewed is free, by the clock of whoever waits


def staging(url: str) -> Path:
    """Return the folder on this node of a run in object storage."""
    url = url.rstrip("/")
    return user_cache_dir() / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[1]


def local_run(path: str) -> Path:
    """Return what a command reads that is given weights: `path`, or a copy of the run that is at this URL now, or of
    the model hf://user/name."""
    if not is_remote(path):
        return Path(path)
    if path.startswith("hf://") and path.count("/") == 3:
        return find_model(path)
    copy = _copy_of(path)
    if (copy / "config.yaml").exists() and ObjectStore(path).read("config.yaml") != (copy / "config.yaml").read_bytes():
        shutil.rmtree(copy)
    RemoteRun(path, copy).fetch()
    return copy


def fetch_config(url: str) -> Path | None:
    """Return a folder with the config.yaml of a run that has checkpoints; None if there is no such run yet."""
    storage, copy = ObjectStore(url), _copy_of(url)
    if not _complete_steps(storage.sizes("checkpoints")):
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
        names, config = self._storage.sizes(), self.local / "config.yaml"
        here = list_checkpoints(self.local / "checkpoints")
        if here and not (config.exists() and self._storage.read("config.yaml") == config.read_bytes()):
            raise InputError(f"{self.local} keeps another run than {self.url} holds: remove it, or move it")
        newest = parse_step(here[-1].name) if here else 0
        newer = sorted({step for step in map(_step_of, names) if step > newest}, reverse=True)
        is_behind = any(self._fetch_checkpoint(f"checkpoints/step-{step:08d}") for step in newer) or not here
        for name in names:
            is_wanted = is_behind or not (self.local / name).exists()
            if is_wanted and (name in LOGS or name.startswith(f"{BEST}/")):
                self._storage.download(name, self.local / name)

    def sync(self, keep: int | None = None) -> None:
        """Upload what is new here; then remove all but the newest `keep` checkpoints there. Raise TakenOverError."""
        if self._lease is not None:
            self._lease.check()
        files = [self.local / name for name in LOGS]
        for folder in ("tensorboard", BEST, "profile"):
            files += sorted((self.local / folder).rglob("*"))
        there = _complete_steps(self._storage.sizes("checkpoints"))
        for checkpoint in list_checkpoints(self.local / "checkpoints"):
            if parse_step(checkpoint.name) > max(there, default=0):
                files += sorted(checkpoint.iterdir(), key=lambda file: file.name == STATE_FILE)
        for file in filter(Path.is_file, files):
            self._send(file)
        if keep is not None:
            names = self._storage.sizes("checkpoints")
            kept = _complete_steps(names)[-keep:]
            # Without train_state.json, which goes first, the other files do not count.
            for name in sorted(names, key=lambda name: not name.endswith(STATE_FILE)):
                if kept and 0 < _step_of(name) < kept[0]:
                    self._storage.remove(name)

    def _fetch_checkpoint(self, name: str) -> bool:
        """Return whether it is complete."""
        data, stored = self._storage.read(f"{name}/{STATE_FILE}"), self._storage.sizes(name)
        try:
            if data is None:
                raise ValueError(f"{STATE_FILE} is missing")
            manifest = Manifest.parse(data)
            with atomic_folder(self.local / name) as partial:
                for file in manifest.sha256:
                    if f"{name}/{file}" in stored:
                        self._storage.download(f"{name}/{file}", partial / file)
                verify_files(partial, manifest)
                (partial / STATE_FILE).write_bytes(data)
        except (ValueError, FileNotFoundError) as error:
            log(f"skipping {self.url}/{name}, which is not complete ({describe_fault(error)})", file=sys.stderr)
            return False
        except OSError:
            if not (self.local / name).is_dir():  # else another process of this node was faster
                raise
        return True

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


def _step_of(name: str) -> int:
    """Return the step of the checkpoint that a stored file belongs to; 0 where it belongs to none."""
    return parse_step(PurePosixPath(name).parent.name)


def _complete_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the complete checkpoints in a listing, ascending."""
    return sorted(_step_of(name) for name in names if _step_of(name) and name.endswith(f"/{STATE_FILE}"))


class TakenOverError(InputError):
    """Another job trains in this run directory."""


class NewestLease(NamedTuple):
    number: int  # 0: there is none
    holder: str  # "": it is free
    host: str
    renewals: str


class Lease:
    """The newest of the objects leases/1, leases/2, …, each of which a conditional write gives to one job, its holder.

    It holds the holder's name, its host and a number that it counts up, so that no two clocks are compared; once
    released, nothing.
    """

    def __init__(self, storage: ObjectStore, holder: str) -> None:
        self._storage, self._holder, self._number = storage, holder, 0
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)

    def take(self) -> None:
        """Take the lease; raise TakenOverError if another job renews it. One that was left is free after
        LEASE_TIMEOUT_S; one of this holder at once: its process has ended, as this one holds the folder's lock."""
        seen = now = self._read()
        if seen.holder not in ("", self._holder):
            log(f"{self._storage.url} is in use by {seen.host}, or was left by it: watching it", file=sys.stderr)
            deadline = time.monotonic() + LEASE_TIMEOUT_S
            while (now := self._read()) == seen and time.monotonic() < deadline:
                time.sleep(LEASE_TIMEOUT_S / 20)
            if now.holder and now != seen:
                raise self._taken_over(now)
        if not self._storage.create(f"{LEASES}/{now.number + 1}", self._text(0)):
            raise self._taken_over(self._read())
        self._number = now.number + 1
        self._storage.remove(f"{LEASES}/{now.number}")
        self._thread.start()

    def check(self) -> None:
        """Raise TakenOverError if another job has a newer lease."""
        newest = self._read()
        if newest.number > self._number:
            raise self._taken_over(newest)

    def release(self) -> None:
        """Leave the directory to others at once, if it was held."""
        self._released.set()
        if self._number:
            self._thread.join()
            try:
                self._storage.write(f"{LEASES}/{self._number}", b"")
            except InputError as error:
                log(f"the next job waits {LEASE_TIMEOUT_S:g} s for the lease of this one: {error}", file=sys.stderr)

    def _keep_renewing(self) -> None:
        for count in itertools.count(1):
            if self._released.wait(RENEW_S):
                return
            try:
                self._storage.write(f"{LEASES}/{self._number}", self._text(count))
            except InputError as error:  # whoever waits tolerates some failures
                log(f"the lease was not renewed: {error}", file=sys.stderr)

    def _text(self, count: int) -> bytes:
        return f"{self._holder} {socket.gethostname()} {count}".encode()

    def _read(self) -> NewestLease:
        number = max((int(PurePosixPath(name).name) for name in self._storage.sizes(LEASES)), default=0)
        text = (self._storage.read(f"{LEASES}/{number}") or b"").decode(errors="replace")
        return NewestLease(number, *f"{text}   ".split(" ")[:3])

    def _taken_over(self, lease: NewestLease) -> TakenOverError:
        url = self._storage.url
        return TakenOverError(f"{url} is in use by another training job, on {lease.host}: wait for it, or set run=")

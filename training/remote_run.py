"""A run in object storage (`run=s3://…`, whatever fsspec knows): a folder on this node, uploaded as it grows.

A checkpoint there counts when its train_state.json does, which is uploaded last. The job that was started last owns the
run: one before it, which may have been left for dead, ends at its next checkpoint.
"""

import hashlib
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from uuid import uuid4

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.model.weights.hub import find_model
from adamae.pipeline.reading.cache import user_cache_dir
from adamae.pipeline.reading.storage import ObjectStore, is_remote
from adamae.training.checkpoint import STATE_FILE, list_checkpoints, parse_step

BEST = "checkpoints/best"
LOGS = ("config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html")
OWNER = "owner"  # holds a name and a host of the job that writes


class TakenOverError(InputError):
    """Another job trains in this run directory."""


def staging(url: str) -> Path:
    """Return the folder on this node of a run in object storage."""
    url = url.rstrip("/")
    return (
        user_cache_dir()
        / "runs"
        / hashlib.sha256(url.encode()).hexdigest()[:16]
        / url.rsplit("/", 1)[1]
    )


def local_run(path: str) -> Path:
    """Return what a command reads that is given weights: `path`, or a copy of the run that is at this URL now, or of
    the model hf://user/name."""
    if not is_remote(path):
        return Path(path)
    if path.startswith("hf://") and path.count("/") == 3:
        return find_model(path)
    copy = _copy_of(path)
    if (copy / "config.yaml").exists() and ObjectStore(path).read("config.yaml") != (
        copy / "config.yaml"
    ).read_bytes():
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
        self._owner = b""
        self._sent: dict[
            str, tuple[int, int]
        ] = {}  # size and time of each file when it was uploaded

    def take_over(self) -> None:
        """Become the one job that may write there, which `sync` needs."""
        self._owner = f"{uuid4().hex} {socket.gethostname()}".encode()
        self._storage.write(OWNER, self._owner)

    def fetch(self) -> None:
        """Download the newest complete checkpoint and the logs, unless a newer one is here already."""
        names, config = self._storage.sizes(), self.local / "config.yaml"
        here = list_checkpoints(self.local / "checkpoints")
        if here and not (
            config.exists() and self._storage.read("config.yaml") == config.read_bytes()
        ):
            raise InputError(
                f"{self.local} keeps another run than {self.url} holds: remove it, or move it"
            )
        newest = parse_step(here[-1].name) if here else 0
        newer = [step for step in _complete_steps(names) if step > newest]
        if newer:
            self._fetch_checkpoint(f"checkpoints/step-{newer[-1]:08d}", names)
        is_behind = bool(newer) or not here
        for name in names:
            is_wanted = is_behind or not (self.local / name).exists()
            if is_wanted and (name in LOGS or name.startswith(f"{BEST}/")):
                self._storage.download(name, self.local / name)

    def sync(self, keep: int | None = None) -> None:
        """Upload what is new here; then remove all but the newest `keep` checkpoints there. Raise TakenOverError."""
        if not self._owner:
            return
        if (owner := self._storage.read(OWNER) or b"") != self._owner:
            host = owner.decode(errors="replace").rpartition(" ")[2]
            raise TakenOverError(
                f"{self.url} was taken over by a job that was started later, on {host}: it continues"
            )
        files = [self.local / name for name in LOGS]
        for folder in ("tensorboard", BEST, "profile"):
            files += sorted((self.local / folder).rglob("*"))
        there = _complete_steps(self._storage.sizes("checkpoints"))
        for checkpoint in list_checkpoints(self.local / "checkpoints"):
            if parse_step(checkpoint.name) > max(there, default=0):
                files += sorted(checkpoint.iterdir(), key=lambda file: file.name == STATE_FILE)
        for file in filter(Path.is_file, files):
            name, status = file.relative_to(self.local).as_posix(), file.stat()
            version = status.st_size, status.st_mtime_ns
            if self._sent.get(name) != version:
                self._storage.upload(file, name)
                self._sent[name] = version
        if keep is not None:
            names = self._storage.sizes("checkpoints")
            kept = _complete_steps(names)[-keep:]
            # Without train_state.json, which goes first, the other files do not count.
            for name in sorted(names, key=lambda name: not name.endswith(STATE_FILE)):
                if kept and 0 < _step_of(name) < kept[0]:
                    self._storage.remove(name)

    def _fetch_checkpoint(self, checkpoint: str, names: Iterable[str]) -> None:
        try:
            with atomic_write(self.local / checkpoint) as partial:
                for name in names:
                    if name.startswith(f"{checkpoint}/"):
                        self._storage.download(name, partial / PurePosixPath(name).name)
        except OSError:
            if not (
                self.local / checkpoint
            ).is_dir():  # else another process of this node was faster
                raise


def _step_of(name: str) -> int:
    """Return the step of the checkpoint that a stored file belongs to; 0 where it belongs to none."""
    return parse_step(PurePosixPath(name).parent.name)


def _complete_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the complete checkpoints in a listing, ascending."""
    return sorted(
        _step_of(name) for name in names if _step_of(name) and name.endswith(f"/{STATE_FILE}")
    )

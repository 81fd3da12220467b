"""Keep a run in object storage (`run=s3://…`, whatever fsspec knows).

The run has a folder on this node, which is uploaded as it grows. A checkpoint in object storage is
complete when its train_state.json is there, which is uploaded last. The job that was started last
owns the run: an earlier one, such as on a node that was thought lost, ends at its next checkpoint.
"""

import hashlib
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path, PurePosixPath
from uuid import uuid4

from pebble.concurrent import thread

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import log
from adamae.model.weights.hub import find_model
from adamae.model.weights.integrity import STATE_FILE
from adamae.pipeline.reading.cache import user_cache_dir
from adamae.pipeline.reading.storage import ObjectStore
from adamae.training.checkpoint import list_checkpoints, parse_step

BEST = "checkpoints/best"
LOGS = ("config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html")
# A file that holds a random name of the job that writes, and its host.
OWNER = "owner"
# After a signal an upload may continue as long as some of it arrives within this time. torchrun
# kills ranks 30 s after the signal, and some spot instances end then.
STOP_TIMEOUT_S = 10.0


class TakenOverError(InputError):
    """Another job trains in this run directory."""


def staging(url: str) -> Path:
    """Return the folder on this node of a run in object storage: cache/runs/HASH/NAME."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()
    return user_cache_dir() / "runs" / digest[:16] / url.rpartition("/")[2]


def local_run(path: str) -> Path:
    """Return the path on this node of a run or weights that a command reads.

    Of a URL, it is a copy of the run as it is there now, or of the model hf://user/name.
    """
    if not is_remote(path):
        return Path(path)
    if path.startswith("hf://") and path.count("/") == 3:
        return find_model(path)
    copy = _copy_of(path)
    # The copy of another run, which this URL had before, may have a newer checkpoint.
    if not _has_config_of(ObjectStore(path), copy, default=True):
        shutil.rmtree(copy)
    RemoteRun(path, copy).fetch()
    return copy


def fetch_config(url: str) -> Path | None:
    """Return a folder with the config.yaml of a run; None if there is no checkpoint of it yet."""
    storage = ObjectStore(url)
    copy = _copy_of(url)
    if not _complete_steps(storage.sizes("checkpoints")):
        return None
    storage.download("config.yaml", copy / "config.yaml")
    return copy


def _copy_of(url: str) -> Path:
    """Return the folder for a copy to be read; a job here may be writing to `staging`."""
    folder = staging(url)
    return folder.parent / "read" / folder.name


def _has_config_of(storage: ObjectStore, local: Path, default: bool) -> bool:
    """Return whether a folder has the config.yaml of a stored run, `default` if it has none."""
    config = local / "config.yaml"
    if not config.exists():
        return default
    return storage.read("config.yaml") == config.read_bytes()


class RemoteRun:
    """A run that has one folder on this node and one in object storage, kept alike."""

    def __init__(self, url: str, local: Path, timeout: float = 60.0) -> None:
        """url: where the run is stored; local: its folder on this node; timeout: see ObjectStore"""
        self.url = url
        self.local = local
        self._storage = ObjectStore(url, timeout)
        self._owner = b""
        # The size and the time of modification of each file when it was uploaded.
        self._uploaded: dict[str, tuple[int, int]] = {}

    @property
    def answered_at(self) -> float:
        """When object storage has last answered, by the monotonic clock."""
        return self._storage.answered_at

    def take_over(self) -> None:
        """Become the one job that may write there; before, `sync` does nothing."""
        self._owner = f"{uuid4().hex} {socket.gethostname()}".encode()
        self._storage.write(OWNER, self._owner)

    def fetch(self) -> None:
        """Download the newest complete checkpoint, unless one here is as new, and the logs.

        Raise InputError if the folder on this node belongs to another run.
        """
        names = self._storage.sizes()
        own_checkpoints = list_checkpoints(self.local / "checkpoints")
        if own_checkpoints and not _has_config_of(self._storage, self.local, default=False):
            raise InputError(
                f"{self.local} keeps another run than {self.url} holds: remove it, or move it"
            )
        own_step = parse_step(own_checkpoints[-1].name) if own_checkpoints else 0
        stored_step = max(_complete_steps(names), default=0)
        if stored_step > own_step:
            self._fetch_checkpoint(f"checkpoints/step-{stored_step:08d}", names)
        # Logs belong to a checkpoint: stored ones replace those here only with a newer checkpoint.
        is_behind = stored_step > own_step or not own_checkpoints
        for name in names:
            is_log = name in LOGS or name.startswith(f"{BEST}/")
            if is_log and (is_behind or not (self.local / name).exists()):
                self._storage.download(name, self.local / name)

    def sync(self, keep: int | None = None) -> None:
        """Upload what is new here, then remove all but the newest `keep` checkpoints there.

        keep: None removes none. Raise TakenOverError if a later job owns the run.
        """
        if not self._owner:
            return
        owner = self._storage.read(OWNER) or b""
        if owner != self._owner:
            host = owner.decode(errors="replace").rpartition(" ")[2]
            raise TakenOverError(
                f"{self.url} was taken over by a job that was started later, on {host}: it"
                " continues"
            )
        for file in self._list_files():
            # Training continues meanwhile, and removes old checkpoints.
            with suppress(FileNotFoundError):
                self._upload(file)
        if keep is not None:
            self._remove_checkpoints(keep)

    def _upload(self, file: Path) -> None:
        """Upload a file that has changed since it was uploaded last."""
        if not file.is_file():
            return
        name = file.relative_to(self.local).as_posix()
        status = file.stat()
        version = (status.st_size, status.st_mtime_ns)
        if self._uploaded.get(name) != version:
            self._storage.upload(file, name)
            self._uploaded[name] = version

    def _list_files(self) -> list[Path]:
        """List the logs, then the files of checkpoints that are not stored yet, in that order."""
        files = [self.local / name for name in LOGS]
        for folder in ("tensorboard", BEST, "profile"):
            files += sorted((self.local / folder).rglob("*"))
        stored_step = max(_complete_steps(self._storage.sizes("checkpoints")), default=0)
        for checkpoint in list_checkpoints(self.local / "checkpoints"):
            if parse_step(checkpoint.name) > stored_step:
                # train_state.json last: it makes the checkpoint complete.
                with suppress(FileNotFoundError):
                    files += sorted(checkpoint.iterdir(), key=lambda file: file.name == STATE_FILE)
        return files

    def _remove_checkpoints(self, keep: int) -> None:
        """Remove stored checkpoints that are older than the newest `keep` complete ones."""
        names = self._storage.sizes("checkpoints")
        kept_steps = _complete_steps(names)[-keep:]
        if not kept_steps:
            return
        # train_state.json first: without it, what is left by a kill is no checkpoint.
        for name in sorted(names, key=lambda name: not name.endswith(STATE_FILE)):
            if 0 < _step_of(name) < kept_steps[0]:
                self._storage.remove(name)

    def _fetch_checkpoint(self, checkpoint: str, names: Iterable[str]) -> None:
        try:
            with atomic_write(self.local / checkpoint) as partial:
                for name in names:
                    if name.startswith(f"{checkpoint}/"):
                        self._storage.download(name, partial / PurePosixPath(name).name)
        except OSError:
            # Another process of this node may have been faster, and a folder is never replaced.
            if not (self.local / checkpoint).is_dir():
                raise


class Uploader:
    """Uploads a run beside training, so that slow storage holds up neither steps nor checkpoints.

    One upload runs at a time. Those that are asked for meanwhile become one, of the newest state.
    """

    def __init__(self, run: RemoteRun, keep: int) -> None:
        """keep: the number of checkpoints that stay in object storage."""
        self._run = run
        self._keep = keep
        self._lock = threading.Lock()
        self._is_requested = False
        # The upload that is running, or the one that has failed permanently.
        self._upload: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Return whether uploads have ended, with an error that `finish` raises."""
        upload = self._upload
        return upload is not None and upload.done() and upload.exception() is not None

    def request(self) -> None:
        """Upload what is new, after the upload that is running, if any."""
        with self._lock:
            self._is_requested = True
            if self._upload is None:
                # pebble's thread is a daemon, so that a second Ctrl-C does not wait for it.
                self._upload = thread(name="uploader")(self._work)()

    def finish(self, *, is_stopping: bool) -> None:
        """Upload what is new, and wait for it. Raise InputError if that fails.

        is_stopping: a scheduler will kill this process soon, so storage that does not answer for
        STOP_TIMEOUT_S is given up. All failures but TakenOverError are then only logged: the
        checkpoint is on this node, and an error would keep a job from being requeued.
        """
        started = time.monotonic()
        last_upload = thread(name="uploader")(self._work_last)()
        while not wait([last_upload], 0.1).done:
            silence = time.monotonic() - max(started, self._run.answered_at)
            if is_stopping and silence > STOP_TIMEOUT_S:
                self._log_failure(f"{self._run.url} has not answered for {silence:.0f} s")
                return
        try:
            last_upload.result()
        except TakenOverError:
            raise
        except InputError as error:
            if not is_stopping:
                raise
            self._log_failure(str(error))

    def _log_failure(self, what: str) -> None:
        kept = f"{self._run.local} keeps the last checkpoint"
        log(f"{what}; {kept}, from which the same command resumes on this node", sys.stderr)

    def _work(self) -> None:
        """Upload until nothing is requested; log it if storage is away."""
        while True:
            with self._lock:
                if not self._is_requested:
                    self._upload = None
                    return
                self._is_requested = False
            try:
                self._run.sync(self._keep)
            except TakenOverError:
                raise
            # Storage that is away for a while must not end the run.
            except InputError as error:
                advice = f"{self._run.local} keeps everything, and the next checkpoint tries again"
                log(f"{error}; {advice}", sys.stderr)

    def _work_last(self) -> None:
        """Wait for the upload that is running, then upload what is still missing."""
        upload = self._upload
        if upload is not None:
            upload.result()
        self._run.sync(self._keep)


def _step_of(name: str) -> int:
    """Return the step of the checkpoint that a stored file belongs to, 0 if it belongs to none."""
    return parse_step(PurePosixPath(name).parent.name)


def _complete_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the complete checkpoints among stored files, ascending."""
    steps = {_step_of(name) for name in names if name.endswith(f"/{STATE_FILE}")}
    return sorted(steps - {0})

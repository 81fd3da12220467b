"""The folder of a run: `config.yaml, checkpoints/, metrics.jsonl, report.html, figures/, tensorboard/, profile/,
quarantine.jsonl`.

A run in object storage has such a folder on every node too, which training.remote_run uploads.
"""

import fcntl
import shutil
from pathlib import Path
from typing import IO

from common.atomic_io import write_text
from common.errors import InputError
from model.weights.pretrained import run_config
from pipeline.reading.storage import is_remote
from training.config import TrainConfig, differences, to_yaml
from training.distributed import is_node_main
from training.remote_run import RemoteRun, staging


def local_path(run: str) -> Path:
    """The folder on this machine of a run, which may be in an object store."""
    return staging(run) if is_remote(run) else Path(run)


class RunDir:
    """Holds a run's folder for one training job at a time; a context manager."""

    def __init__(self, config: TrainConfig, is_main: bool) -> None:
        """Only the first process of a job writes the configuration and holds the folder."""
        self.path, self.is_main = local_path(config.run), is_main
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.quarantine = self.path / "quarantine.jsonl"
        self.profile = self.path / "profile"
        self.figures = self.path / "figures"  # the newest plots, for the report
        self.report = self.path / "report.html"
        self.remote = RemoteRun(config.run, self.path) if is_remote(config.run) else None
        self._lock: IO[str] | None = None
        if is_main:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            try:
                self._prepare(config)
            except BaseException:
                self.__exit__()
                raise

    def _prepare(self, config: TrainConfig) -> None:
        for partial in self.checkpoints.glob(".*.partial"):  # left by a kill in the middle of a save
            shutil.rmtree(partial)
        if self.remote is not None:
            self.remote.hold()
            self.remote.fetch()
        self._check_or_write(config)
        if self.remote is not None:
            self.remote.sync()  # a store that cannot be written to says so now, not at the first checkpoint

    def fetch(self) -> None:
        """Have the newest checkpoint of a run in a store, on a machine which the first process is not on."""
        if self.remote is not None and not self.is_main and is_node_main():
            self.remote.fetch()

    def _hold(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{self.path} is in use by another training job: wait for it, or choose run=") from error

    def _check_or_write(self, config: TrainConfig) -> None:
        file = self.path / "config.yaml"
        if not file.exists():
            write_text(file, to_yaml(config))
            return
        if config.resume == "never":
            raise InputError(f"{self.path} already holds a run and resume is never: choose another run=")
        changed = differences(config, run_config(self.path))
        if changed:
            raise InputError(
                f"{self.path} was made with another configuration ({'; '.join(changed)}): put these back, or begin a"
                f" new run with them: branch={config.run} goes on with its weights, optimizer and place, and"
                f" {'model.init' if config.task == 'pretrain' else 'finetune.checkpoint'}={config.run} with its"
                " weights alone, in another run="
            )

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_: object) -> None:
        if self.remote is not None and self.is_main:
            self.remote.release()
        if self._lock is not None:
            self._lock.close()

"""Where a run's figures go besides metrics.jsonl: TensorBoard, Weights & Biases."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from common.errors import InputError, name_disk_errors
from training.config import TrainConfig, to_yaml
from training.distributed import Distributed
from training.run_dir import RunDir


class Sink(Protocol):
    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def picture(self, name: str, picture: Image.Image, step: int) -> None: ...

    def config(self, config: TrainConfig) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        # Steps that a killed run logged after its last checkpoint are logged again.
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self.writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def config(self, config: TrainConfig) -> None:
        self.writer.add_text("config", f"```yaml\n{to_yaml(config)}```")

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """One run of theirs for a run folder, however often it is started; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path, run: str) -> None:
        """Raises InputError if the package is missing or its service refuses."""
        try:
            import wandb
        except ImportError as error:
            raise InputError("metrics names wandb, which is not installed: pip install 'adamae[wandb]'") from error
        self._wandb: Any = wandb
        number = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(
                project="adamae", name=run, id=number, resume="allow", dir=str(folder),
                settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except (wandb.Error, OSError) as error:
            said = " ".join(str(error).split())
            raise InputError(f"wandb cannot be used ({said}): wandb login, or WANDB_MODE=offline") from error

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._run.log({name: self._wandb.Image(picture)}, step=step)

    def config(self, config: TrainConfig) -> None:
        self._run.config.update(dataclasses.asdict(config), allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


def sinks_of(config: TrainConfig, folder: RunDir, process: Distributed, first_step: int) -> list[Sink]:
    """Those that `metrics` names, of the first process; the others write nothing."""
    sinks: list[Sink] = []
    if process.is_main and "tensorboard" in config.metrics:
        with name_disk_errors(folder.tensorboard):
            sinks.append(TensorBoard(folder.tensorboard, first_step))
    if process.is_main and "wandb" in config.metrics:
        sinks.append(WeightsAndBiases(folder.path, config.run))
    for sink in sinks:
        sink.config(config)
    return sinks

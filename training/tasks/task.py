"""What the loop needs to know about a task: a new one is a file beside this one and a line in training/tasks."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from adamae.pipeline.loader import Batch
from adamae.training.logger import Logger


class Task(ABC):
    """A model, its loss and its evaluation; made from (config, dataset, dist); InputError if these do not fit."""

    model: nn.Module
    metadata: dict[str, str]  # of the files of its weights
    target_digest: str = ""  # a hash of what targets are made by, besides the clips
    clip_multiple: int = 1  # the number of clips in a batch is a multiple of it

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds; `model` is one of them."""
        return {"model": self.model}

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return those of the optimizer, each with weight_decay and lr_scale."""

    @abstractmethod
    def init_weights(self, source: str) -> None:
        """Start from other weights: a run, a checkpoint or anybody's file; "": from scratch. Raise InputError."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a batch, and scalars on the device to log. `model`: the task's, perhaps wrapped."""

    def after_update(self) -> None:  # noqa: B027  # most tasks have nothing to do
        """Do what follows every optimizer step."""

    def plot(self, step: int, log: Logger) -> None:  # noqa: B027
        """Log images of what the model of this step does, in the main rank; called at checkpoints."""

    @abstractmethod
    def evaluate(self, step: int, log: Logger) -> None:
        """Evaluate the model of this step, and log the results."""

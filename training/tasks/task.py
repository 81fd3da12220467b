"""The interface between the training loop and a task.

A new task is a file beside this one, and a line in training/tasks/__init__.py.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from adamae.pipeline.loader import Batch
from adamae.training.logger import Logger


class Task(ABC):
    """A model, its loss and its evaluation.

    train.py makes it from (config, dataset, dist); it raises InputError if these do not fit.
    """

    model: nn.Module
    # Written to the header of each file of weights.
    metadata: dict[str, str]
    # A hash of the teacher's weights, or of anything else besides clips that targets depend on.
    target_digest: str = ""
    # The number of clips in a batch is a multiple of this.
    clip_multiple: int = 1

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that a checkpoint holds, by the names of their files; `model` is one."""
        return {"model": self.model}

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer, each with weight_decay and lr_scale."""

    @abstractmethod
    def init_weights(self, source: str) -> None:
        """Load the weights to start from.

        source: a run, a checkpoint or another project's file; "": none, the weights stay random.
        Raise InputError if they cannot be read or do not fit.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a batch, and scalars on the device to be logged.

        model: the task's own, compiled or wrapped in DistributedDataParallel.
        """

    # Not abstract (B027): most tasks have nothing to do here.
    def after_update(self) -> None:  # noqa: B027
        """Do what follows every optimizer step, such as to update an average of the weights."""

    def plot(self, step: int, log: Logger) -> None:  # noqa: B027
        """Log images of the model's results, in the main rank; called at checkpoints."""

    @abstractmethod
    def evaluate(self, step: int, log: Logger) -> None:
        """Evaluate the model of this step, and log the results."""

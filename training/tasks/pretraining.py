"""What a run learns: the model, and the loss of a batch with the figures that describe it."""

import sys
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from common.logging import log
from model.adamae import AdaMAE, Output
from model.weights import pretrained
from model.weights.warm_start import warm_start
from pipeline.loader import Batch
from training.checkpoint import existing
from training.config import TrainConfig
from training.distributed import Distributed
from training.held_out import HeldOut, ReconstructionPlots
from training.logger import Logger
from training.optimizer import make_optimizer
from training.remote_run import local_run
from training.run_dir import local_path


class StepResult(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]  # scalars on the device


class Objective(Protocol):
    """What the loop needs to know about a run's purpose."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds; `model` is one of them."""

    @property
    def about(self) -> dict[str, str]:
        """What a file of these weights says of itself."""

    @property
    def together(self) -> int:
        """Clips that a batch holds a multiple of."""

    def optimizer(self) -> torch.optim.Optimizer: ...

    def __call__(self, model: nn.Module, batch: Batch) -> StepResult:
        """`model`: this objective's model, perhaps wrapped (DDP) or compiled."""

    def after_update(self) -> None:
        """To be called after every optimizer step."""

    def after_none(self) -> None:
        """To be called instead after forward passes that no step followed: what they left in the model goes."""

    def review_due(self, step: int, is_last: bool) -> bool:
        """Whether to look at what has been learnt after this step; the same in all processes."""

    def review(self, step: int, metrics: Logger) -> None:
        """Look at it; may be interrupted and done again."""


class Pretraining:
    """Masked reconstruction plus the sampling loss (SPEC §4)."""

    def __init__(self, config: TrainConfig, process: Distributed) -> None:
        """Raises InputError if the weights to start from do not fit."""
        self.config, self.seed = config, config.seed
        model = AdaMAE(config.model)
        if config.model.init and not config.branch and not existing(local_path(config.run) / "checkpoints"):
            said = warm_start(model, local_run(config.model.init))
            if process.is_main:
                log(said, sys.stderr)
        self.model = model.to(process.device)
        self.plots: ReconstructionPlots | None = None
        self.held_out = HeldOut(config) if config.evaluation.shards else None

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    @property
    def about(self) -> dict[str, str]:
        return pretrained.make_metadata(self.config.model)

    @property
    def together(self) -> int:
        return 1

    def optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.config.optimizer)

    def __call__(self, model: nn.Module, batch: Batch) -> StepResult:
        device = batch.clip.device
        # Filled on the device: a copy from the host would wait for it, an int would be compiled into the graph.
        seed = torch.full((), self.seed, dtype=torch.int64, device=device)
        offset = torch.full((), batch.positions[0], dtype=torch.int64, device=device)
        output: Output = model(batch.clip, seed, offset)
        metrics = {
            "loss": output.loss,
            "reconstruction_loss": output.reconstruction_loss,
            "sampling_loss": output.sampling_loss,
        }
        if output.log_probs is not None:
            metrics["sampler_entropy"] = -(output.log_probs.exp() * output.log_probs).sum(-1).mean()
        return StepResult(output.loss, metrics)

    def after_update(self) -> None:
        pass

    def after_none(self) -> None:
        pass

    def review_due(self, step: int, is_last: bool) -> bool:
        every = self.config.evaluation.every
        return every is not None and (step % every == 0 or (is_last and self.held_out is not None))

    def review(self, step: int, metrics: Logger) -> None:
        if self.held_out is not None:
            found = self.held_out.evaluate(self.model, metrics.dist)
            metrics.scalars(step, {f"evaluation/{name}": value for name, value in found.items()})
        if metrics.dist.is_main:
            self.plots = self.plots or ReconstructionPlots(self.config)
            for name, image in self.plots.plot(self.model).items():
                metrics.image(step, name, image)

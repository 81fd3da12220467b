"""What a run learns: the model, and the loss of a batch with the figures that describe it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.adamae import AdaMAE, Output
from model.config import ModelConfig
from pipeline.loader import Batch


class StepResult(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]  # scalars on the device


class Pretraining:
    """Masked reconstruction plus the sampling loss (SPEC §4)."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.model = AdaMAE(config)
        self.seed = seed

    def __call__(self, model: nn.Module, batch: Batch) -> StepResult:
        """`model`: this objective's model, perhaps wrapped (DDP) or compiled."""
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

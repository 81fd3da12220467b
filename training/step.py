"""One optimizer step, the same for train.py, doctor.py and the benchmarks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from adamae.common.devices import autocast_to
from adamae.pipeline.loader import Batch
from adamae.training.config import TrainConfig
from adamae.training.distributed import count_ranks
from adamae.training.logger import SKIPPED
from adamae.training.optimizer import update
from adamae.training.parallelize import reduce_gradients
from adamae.training.tasks.task import Task


def train_step(
    model: nn.Module,
    task: Task,
    microbatches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    lr: float,
    config: TrainConfig,
) -> dict[str, Tensor]:
    """Take one optimizer step on this rank's micro-batches; return its scalars.

    Scalars are tensors [] on the device, means over the clips of this rank. Nothing here reads a
    tensor, so the host never waits for the device.
    """
    num_ranks = count_ranks()
    totals: dict[str, Tensor] = {}
    for batch in microbatches:
        # DistributedDataParallel averages gradients over ranks, whose micro-batches may differ in
        # size. Each counts by its clips, so that the mean is over all clips of the step: 3 of 8
        # clips count 3/8 × 2 on one of two ranks, and DDP halves the sum.
        fraction = len(batch.positions) * num_ranks / config.clips_per_step(num_ranks)
        # Ranks exchange gradients once per step, in the backward pass of the last micro-batch.
        with reduce_gradients(model, now=batch.is_last):
            with autocast_to(batch.clip.device, config.precision):
                loss, scalars = task.loss(model, batch)
            (loss * fraction).backward()
        for name, value in scalars.items():
            totals[name] = totals.get(name, 0) + value.detach() * fraction
    norm = update(optimizer, lr, config.optimizer.clip_grad_norm)
    task.after_update()
    return totals | {"grad_norm": norm, SKIPPED: (~norm.isfinite()).float()}

"""The length of a run, its learning rate at each step, and the seed of each step's drop path."""

import math

import numpy as np
import torch

from adamae.common.logging import format_count
from adamae.training.config import TrainConfig

# Learning rates of the configuration are for this many clips per step (Goyal et al. 2017, as the
# paper and VideoMAE use them).
REFERENCE_BATCH = 256


class Schedule:
    """A learning rate with linear warm-up, then half a cosine.

    It is a function of the step, so a checkpoint holds nothing of it.
    """

    def __init__(self, config: TrainConfig, clips_per_epoch: int, world_size: int = 1) -> None:
        self.clips_per_epoch = clips_per_epoch
        self.clips_per_video = config.data.repeats
        self.global_batch = config.clips_per_step(world_size)
        self.total_steps = config.steps or math.ceil(
            config.epochs * clips_per_epoch / self.global_batch
        )
        self.warmup_steps = round(config.optimizer.warmup_ratio * self.total_steps)
        scale = self.global_batch / REFERENCE_BATCH
        self.peak_lr = config.optimizer.base_lr * scale
        self.min_lr = config.optimizer.min_lr * scale
        self.warmup_lr = config.optimizer.warmup_lr * scale

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_lr + (self.peak_lr - self.warmup_lr) * step / self.warmup_steps
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr + (self.peak_lr - self.min_lr) * cosine

    def describe(self) -> list[str]:
        """Return the lines that a run logs at its start."""
        epochs = self.total_steps * self.global_batch / self.clips_per_epoch
        dataset = format_count(self.clips_per_epoch // self.clips_per_video, "video")
        if self.clips_per_video > 1:
            dataset += f", {self.clips_per_video} clips each"
        return [
            f"dataset: {dataset}; global batch {format_count(self.global_batch, 'clip')};"
            f" {format_count(self.total_steps, 'step')} ({epochs:.3g} epochs)",
            f"learning rate {self.peak_lr:.3g} (base_lr × {self.global_batch}/{REFERENCE_BATCH}),"
            f" warm-up {self.warmup_steps:,} steps from {self.warmup_lr:.3g},"
            f" cosine to {self.min_lr:.3g}",
        ]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for one step, so that a resumed run repeats its drop path."""
    # SeedSequence keeps neighboring steps and ranks independent, as seed + step + rank would not.
    state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]) >> 1)

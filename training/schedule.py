"""How long a run is, what its learning rate is at each step, and what each step's dropout is seeded with."""

import math

import numpy as np
import torch

from adamae.training.config import TrainConfig


class Schedule:
    """Linear warm-up, then half a cosine: the learning rate is a function of the step, so nothing has to be resumed."""

    def __init__(self, config: TrainConfig, clips_per_epoch: int, world_size: int = 1) -> None:
        self.clips_per_epoch = clips_per_epoch
        self.global_batch = config.clips_per_step(world_size)
        self.total_steps = config.steps or math.ceil(
            config.epochs * clips_per_epoch / self.global_batch
        )
        self.warmup_steps = round(config.optimizer.warmup_ratio * self.total_steps)
        scale = self.global_batch / 256
        self.peak_lr = config.optimizer.base_lr * scale
        self.min_lr = config.optimizer.min_lr * scale
        self.warmup_lr = config.optimizer.warmup_lr * scale

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.warmup_lr + (self.peak_lr - self.warmup_lr) * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.min_lr + (self.peak_lr - self.min_lr) * 0.5 * (
            1 + math.cos(math.pi * min(1.0, done))
        )

    def describe(self) -> list[str]:
        """Return the lines that a run logs at its start."""
        epochs = self.total_steps * self.global_batch / self.clips_per_epoch
        return [
            f"dataset: {self.clips_per_epoch:,} clips; global batch {self.global_batch}; {self.total_steps:,} steps"
            f" ({epochs:.3g} epochs)",
            f"learning rate {self.peak_lr:.3g} (base_lr × {self.global_batch}/256), warm-up {self.warmup_steps:,} steps"
            f" from {self.warmup_lr:.3g}, cosine to {self.min_lr:.3g}",
        ]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for one step, so that dropout after a resume is what it would have been without."""
    state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]) >> 1)

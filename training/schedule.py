"""How long a run is, what its learning rate is at each step, and what each step's dropout is seeded with."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from training.config import TrainConfig
from training.optimizer import Schedule


@dataclass(frozen=True)
class Horizon:
    """A run's length in every unit."""

    clips_per_epoch: int
    global_batch: int  # clips per optimizer step, over all processes
    total_steps: int
    schedule: Schedule

    @classmethod
    def of(cls, config: TrainConfig, clips_per_epoch: int, world_size: int) -> "Horizon":
        global_batch = config.clips_per_step(world_size)
        steps_per_epoch = clips_per_epoch / global_batch
        total_steps = config.steps or math.ceil(config.epochs * steps_per_epoch)
        schedule = Schedule.of(config.optimizer, global_batch, steps_per_epoch, total_steps)
        return cls(clips_per_epoch, global_batch, total_steps, schedule)

    def describe(self, config: TrainConfig) -> list[str]:
        """Return the lines that a run logs at its start."""
        schedule, epochs = self.schedule, self.total_steps * self.global_batch / self.clips_per_epoch
        lines = [
            f"dataset: {self.clips_per_epoch:,} clips; global batch {self.global_batch}; {self.total_steps:,} steps"
            f" ({epochs:.3g} epochs)",
            f"learning rate {schedule.peak_lr:.3g} ({config.optimizer.base_lr:g} × {self.global_batch}/256), warm-up"
            f" {schedule.warmup_steps:,} steps from {schedule.warmup_lr:.3g}, cosine to {schedule.min_lr:.3g}",
        ]
        if schedule.warmup_steps >= self.total_steps:
            lines.append(
                f"WARNING: the warm-up of {schedule.warmup_steps:,} steps is longer than the run, which ends at a"
                f" learning rate of {schedule.lr(self.total_steps):.3g}: lower optimizer.warmup_epochs"
            )
        return lines


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for one step, so that dropout after a resume is what it would have been without."""
    state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]) >> 1)

"""Time pre-training steps on clips of noise, which are already on the device."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adamae.model.config import ModelConfig
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import Batch
from adamae.training.config import Compile, TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.optimizer import make_optimizer
from adamae.training.parallelize import compile_in_place, keep_bf16_copies
from adamae.training.step import train_step
from adamae.training.tasks.pretraining import Pretraining


def time_calls(
    call: Callable[[], Any], device: torch.device, warmup: int, repetitions: int
) -> list[float]:
    """Return the milliseconds of each of `repetitions` calls, after `warmup` untimed ones.

    On CUDA they are timed by events, so that calls queue up as they do in training.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(repetitions):
            call()
            times.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def noise_clip(config: ModelConfig, batch_size: int, device: torch.device) -> Tensor:
    """Return random uint8 [B, T, H, W, C]: the contents change neither speed nor memory."""
    shape = (batch_size, config.num_frames, *config.frame_size, config.in_channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def make_config(config: ModelConfig) -> TrainConfig:
    """Return the default configuration of a run that trains this model, without shards."""
    data = DataConfig(shards="none", repeats=config.views)
    return TrainConfig(data=data, model=config)


class PretrainingStep:
    """Calls `train_step` on a clip uint8 [B, T, H, W, C], which is on the model's device."""

    def __init__(self, task: Pretraining, compiled: Compile = False) -> None:
        self.task = task
        self.model = task.model
        if compiled:
            compile_in_place(task.model, compiled)
        self.optimizer = make_optimizer(task.parameter_groups(), task.config.optimizer)
        keep_bf16_copies(task.model, self.optimizer, task.config, task.dist.device)

    @classmethod
    def of(
        cls, config: ModelConfig, device: torch.device, compiled: Compile = False
    ) -> "PretrainingStep":
        """Make the step of a model with random weights, on the device."""
        return cls(Pretraining(make_config(config), None, Distributed(device.type)), compiled)

    def __call__(self, clip: Tensor) -> dict[str, Tensor]:
        num_clips = len(clip)
        config = replace(self.task.config, batch_size=num_clips)
        # Pre-training reads neither labels nor keys.
        labels = torch.empty(0)
        keys = [""] * num_clips
        batch = Batch(clip, labels, keys, positions=list(range(num_clips)))
        return train_step(self.model, self.task, [batch], self.optimizer, 1e-4, config)

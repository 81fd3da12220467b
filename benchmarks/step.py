"""One pre-training step as `train.py` takes it, on a clip that is already on the device, and its speed and memory."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Row, Timing, noise_clip, time_calls
from model.config import ModelConfig
from pipeline.config import DataConfig
from pipeline.loader import Batch
from train import train_step
from training.config import Compile, TrainConfig
from training.distributed import Distributed
from training.optimizer import make_optimizer
from training.parallelize import compile_in_place, keep_bf16_copies
from training.tasks.pretraining import Pretraining


def make_config(config: ModelConfig) -> TrainConfig:
    return TrainConfig(data=DataConfig(shards="none"), model=config)


class PretrainingStep:
    """Calls train.py's `train_step` on a clip uint8 [B, T, H, W, C], which is on the model's device."""

    def __init__(self, task: Pretraining, compiled: Compile = False) -> None:
        self.task, self.model = task, task.model
        if compiled:
            compile_in_place(task.model, compiled)
        self.optimizer = make_optimizer(task.parameter_groups(), task.config.optimizer)
        keep_bf16_copies(task.model, self.optimizer, task.config, task.dist.device)

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device, compiled: Compile = False) -> "PretrainingStep":
        return cls(Pretraining(make_config(config), None, Distributed(device.type)), compiled)

    def __call__(self, clip: Tensor) -> dict[str, Tensor]:
        count = len(clip)
        config = replace(self.task.config, batch_size=count)
        batch = Batch(clip, torch.empty(0), [""] * count, list(range(count)))  # pre-training reads no labels
        return train_step(self.model, self.task, [batch], self.optimizer, 1e-4, config)


def measure_config(
    config: ModelConfig, batch_size: int, repetitions: int, device: torch.device, compiled: Compile = False
) -> tuple[Timing, Row]:
    """Measure a pre-training step, for a process of its own."""
    step = partial(PretrainingStep.of(config, device, compiled), noise_clip(config, batch_size, device))
    return measure_step(step, batch_size, repetitions, device)


def measure_step(
    step: Callable[[], object], batch_size: int, repetitions: int, device: torch.device, warmup: int = 4
) -> tuple[Timing, Row]:
    """Time a step, and measure its GPU memory or on a CPU its CPU time, over all threads.

    warmup: steps on a GPU, of which the first compile and tune and the next ones bring it to its usual clock.
    """
    if device.type != "cuda":
        step()
        start = time.process_time()
        timing = time_calls(step, device, warmup=0, repetitions=repetitions)
        cpu_ms = (time.process_time() - start) * 1e3 / repetitions / batch_size
        return timing, {"cpu_ms_per_clip": round(cpu_ms, 1)}
    time_calls(step, device, warmup=warmup - 1, repetitions=1)
    torch.cuda.reset_peak_memory_stats(device)  # compiling and tuning take memory too, once
    timing = time_calls(step, device, warmup=0, repetitions=repetitions)
    return timing, {"measured_peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 3)}

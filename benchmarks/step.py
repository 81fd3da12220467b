"""One pre-training step as `train.py` takes it, on a clip that is already on the device, and its speed and memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Row, cpu_seconds, noise_clip, time_calls
from common.devices import explain_out_of_memory
from model.config import ModelConfig
from pipeline.config import DataConfig
from pipeline.loader import Batch
from train import train_step
from training.config import Compile, TrainConfig
from training.distributed import Distributed
from training.logger import peak_memory_gib
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


@explain_out_of_memory("lower --batch-size")
def measure_config(
    config: ModelConfig, batch_size: int, repetitions: int, device: torch.device, compiled: Compile = False
) -> Row:
    """Measure a pre-training step, for a process of its own."""
    step = partial(PretrainingStep.of(config, device, compiled), noise_clip(config, batch_size, device))
    return measure_step(step, repetitions, device)


def measure_step(step: Callable[[], object], repetitions: int, device: torch.device) -> Row:
    """Return the milliseconds of each step, the seconds that this process and its workers computed in all of them, and
    the peak memory (on a CPU, of this process, Python included)."""
    step()
    if device.type == "cuda":
        # The first steps compile and tune, which takes memory, once; the next ones bring a GPU to its usual clock.
        time_calls(step, device, 9, 1)
        torch.cuda.reset_peak_memory_stats(device)
    cpu = cpu_seconds()
    milliseconds = time_calls(step, device, 0, repetitions)
    cpu = cpu_seconds() - cpu
    return {"milliseconds": milliseconds, "cpu_seconds": cpu, "peak_memory_gib": peak_memory_gib(device)}

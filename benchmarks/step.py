"""The speed and memory of one pre-training step as `train.py` takes it."""

from collections.abc import Callable
from functools import partial

import torch

from adamae.benchmarks.harness import Row, cpu_seconds
from adamae.common.devices import explain_out_of_memory
from adamae.model.config import ModelConfig
from adamae.training.config import Compile
from adamae.training.logger import peak_memory_gib
from adamae.training.timing import PretrainingStep, noise_clip, time_calls


@explain_out_of_memory("lower --batch-size")
def measure_config(
    config: ModelConfig,
    batch_size: int,
    repetitions: int,
    device: torch.device,
    compiled: Compile = False,
) -> Row:
    """Measure a pre-training step, for a process of its own."""
    step = partial(
        PretrainingStep.of(config, device, compiled), noise_clip(config, batch_size, device)
    )
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
    return {
        "milliseconds": milliseconds,
        "cpu_seconds": cpu,
        "peak_memory_gib": peak_memory_gib(device),
    }

"""The speed and memory of one pre-training step as `train.py` takes it."""

from collections.abc import Callable

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
    """Measure a pre-training step; call it in a process of its own.

    Otherwise its peak memory includes what earlier measurements still hold, such as the workspaces
    of cuBLAS or, on a CPU, all that Python has not returned to the system.
    """
    step = PretrainingStep.of(config, device, compiled)
    clip = noise_clip(config, batch_size, device)
    return measure_step(lambda: step(clip), repetitions, device)


def measure_step(step: Callable[[], object], repetitions: int, device: torch.device) -> Row:
    """Return the milliseconds of each step, and the CPU time and peak memory of all.

    CPU time is that of this process and its workers. Peak memory is in GiB, on a CPU that of this
    process, Python included.
    """
    # AdamW's moments are allocated in the first step.
    step()
    if device.type == "cuda":
        # The first steps compile kernels and tune them, which takes time and memory only once. The
        # next ones bring a GPU to the clock at which it will train for hours.
        time_calls(step, device, warmup=9, repetitions=1)
        torch.cuda.reset_peak_memory_stats(device)
    cpu_start = cpu_seconds()
    milliseconds = time_calls(step, device, warmup=0, repetitions=repetitions)
    return {
        "milliseconds": milliseconds,
        "cpu_seconds": cpu_seconds() - cpu_start,
        "peak_memory_gib": peak_memory_gib(device),
    }

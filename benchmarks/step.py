"""One pre-training step as `train.py` takes it, on a clip that is already on the device, and its speed and memory."""

import time
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Row, Timing, time_calls
from common.devices import autocast_to
from model.adamae import AdaMAE
from model.config import ModelConfig
from training.config import Compile, OptimizerConfig
from training.optimizer import make_optimizer, parameter_groups, update
from training.parallelize import compile_in_place


def noise_clip(config: ModelConfig, batch_size: int, device: torch.device) -> Tensor:
    """Return random uint8 [B, T, H, W, C]: the contents change neither speed nor memory."""
    shape = (batch_size, config.num_frames, *config.frame_size, config.in_channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


class PretrainingStep:
    """Callable on clips uint8 [B, T, H, W, 3] on the model's device."""

    def __init__(self, model: AdaMAE, compiled: Compile = False) -> None:
        self.model = model
        if compiled:
            compile_in_place(model, compiled)
        config = OptimizerConfig()
        groups = parameter_groups(model, config.weight_decay, model.no_weight_decay())
        self.optimizer = make_optimizer(groups, config)
        device = next(model.parameters()).device
        self.seed, self.offset = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def loss(self, clip: Tensor) -> Tensor:
        with autocast_to(clip.device, "bf16"):
            loss: Tensor = self.model(clip, self.seed, self.offset).loss
            return loss

    def update(self) -> None:
        self.offset += 1  # another mask at every step
        update(self.optimizer, lr=1e-4, clip_grad_norm=None)

    def __call__(self, clip: Tensor) -> None:
        self.loss(clip).backward()
        self.update()


def measure_step(
    config: ModelConfig, batch_size: int, repetitions: int, device: torch.device, compiled: bool = False
) -> tuple[Timing, Row]:
    """Time a step, for a process of its own, and measure its GPU memory or on a CPU its CPU time."""
    with device:
        step = partial(PretrainingStep(AdaMAE(config), compiled), noise_clip(config, batch_size, device))
    if device.type != "cuda":
        step()
        start = time.process_time()
        timing = time_calls(step, device, warmup=0, repetitions=repetitions)
        cpu_ms = (time.process_time() - start) * 1e3 / repetitions / batch_size
        return timing, {"cpu_ms_per_clip": round(cpu_ms, 1)}
    time_calls(step, device, warmup=3, repetitions=1)
    torch.cuda.reset_peak_memory_stats(device)
    timing = time_calls(step, device, warmup=0, repetitions=repetitions)
    free, total = torch.cuda.mem_get_info(device)
    sizes = {
        "measured_peak_gib": torch.cuda.max_memory_allocated(device),
        "reserved_peak_gib": torch.cuda.max_memory_reserved(device),
        "driver_used_gib": total - free,
    }
    return timing, {name: round(size / 2**30, 3) for name, size in sizes.items()}

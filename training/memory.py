"""Whether a step will fit, before the first one is taken: an estimate at once, and byte by byte where it is close.

The estimate counts what each part keeps for its backward pass, in bytes for a token and a channel. It was read off
benchmarks/accounting.py, which needs some seconds: of its table of ViT-Base, every point is met within 7 %, nearly all
within 1; tiny models in fp32, within 12.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from common.devices import choose_precision
from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from pipeline.shards.format import Sides
from training.config import TrainConfig

BYTES_PER_WEIGHT = 13.4  # fp32, AdamW's two moments, and the copies in bf16 that autocast keeps
ENCODER, DECODER = 28.1, 24.1  # a block; the encoder's residual stream is fp32
SAMPLER, MORE_SAMPLER, MLP_SAMPLER = 34.1, 26.1, 6.0  # the first block with what it reads, each further one
BLOCK_INPUT = 2.0  # what activation checkpointing keeps of a block
FP32_SAMPLER, FP32 = 1.6, 1.6  # what is kept of products in fp32, as a multiple of that of bf16
CLOSE = (0.85, 1.15)  # shares of what there is, between which the estimate does not decide
# PyTorch's CublasHandlePool.cpp: by its own allocator, 32 MiB for each thread that multiplies, on GPUs of compute
# capability 9, 10 and 12 (8 on others); cuBLASLt is lent the same. The forward pass has a thread, the backward another.
CUBLAS_BYTES = 2 * 32 * 2**20
# What no tensor owns: CUDA's context with loaded kernels, NCCL's buffers, the allocator's fragments; other programs.
RESERVE_GPU, RESERVE_SHARE_CPU = 1.5e9, 0.1


@dataclass(frozen=True)
class Need:
    """Bytes at the peak of a step."""

    fixed: float
    per_clip: float

    def of(self, clips: int) -> float:
        return self.fixed + clips * self.per_clip

    def with_more(self, per_clip: float) -> "Need":
        return replace(self, per_clip=self.per_clip + per_clip)

    def largest(self, room: float) -> int:
        """The most clips that fit into `room` bytes."""
        return max(0, int((room - self.fixed) / self.per_clip))


def check_memory(
    config: TrainConfig, model: nn.Module, batch_size: int, device: torch.device, videos: Iterable[Sides] = ()
) -> str:
    """What a step of `batch_size` clips takes beside what this process may have, as a sentence.

    videos: the sides of all that may be decoded. "" for a probe, which learns little. Raises InputError, with the
    largest batch that fits, where it does not.
    """
    if not isinstance(model, AdaMAE | VideoClassifier):
        return ""
    loaded = 0
    if device.type == "cuda" and config.data.decoder != "pyav":
        most_pixels = max((sides.max_area for sides in videos), default=0)
        loaded = loaded_bytes(config.model, config.data.prefetch, most_pixels)
    need, room = estimated(model, config.precision, device).with_more(loaded), available_bytes(device)
    share, about = need.of(batch_size) / room, "about "
    if CLOSE[0] < share < CLOSE[1] and isinstance(model, AdaMAE) and not config.compile:
        need, about = counted(config.model, batch_size, device).with_more(loaded), ""
        share = need.of(batch_size) / room
    has = f"{gib(room)} of {'GPU memory' if device.type == 'cuda' else 'memory'} that this process may take"
    takes = f"{about}{gib(need.of(batch_size))}"
    if share > (1 if not about else CLOSE[1]):
        raise InputError(
            f"batch_size={batch_size} would take {takes} in a step, of {has}: {about}{need.largest(room)} clips are the"
            f" most that fit; lower batch_size{_and_else(config)}"
        )
    return f"{'warning: ' if share > 1 else ''}a step of {batch_size} clips takes {takes}, of {has}"


def estimated(model: AdaMAE | VideoClassifier, precision: str, device: torch.device) -> Need:
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    in_fp32 = choose_precision(device, precision) == "fp32"  # type: ignore[arg-type]
    clip = config.num_frames * math.prod(config.frame_size) * config.in_channels
    if isinstance(model, AdaMAE):
        kept = _kept_by_pretraining(config, on_cpu=device.type == "cpu")
    else:
        kept = config.num_tokens * (_encoder_block(config) * config.dimensions.encoder_depth + 4 * config.patch_values)
    fixed = (12.0 if in_fp32 else BYTES_PER_WEIGHT) * parameters + (CUBLAS_BYTES if device.type == "cuda" else 0)
    return Need(fixed, clip + kept * (FP32 if in_fp32 else 1))


def loaded_bytes(config: ModelConfig, prefetch: int, stored_pixels: int) -> int:
    """Bytes of GPU memory that DALI holds for a clip of a step: the frames, as they are stored, of the batch that it
    decodes, and the clips of those that wait for their turn (pipeline/loader.py)."""
    return config.num_frames * 3 * (stored_pixels + prefetch * math.prod(config.frame_size))


def counted(config: ModelConfig, batch_size: int, device: torch.device) -> Need:
    """Byte by byte, in some seconds; exact for `batch_size`."""
    from benchmarks.accounting import predict

    account = predict(config, batch_size, on_gpu=device.type == "cuda", with_flops=False)
    return Need(account.fixed_bytes, (account.peak_bytes - account.fixed_bytes) / batch_size)


def available_bytes(device: torch.device) -> float:
    """What this process may take: of its GPU what is free or its own, of the machine's memory its share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1.0, free + torch.cuda.memory_reserved(device) - RESERVE_GPU)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    most, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if most.is_file() and (limit := most.read_text(encoding="ascii").strip()).isdigit():  # a container's
        free = min(free, int(limit) - int(used.read_text(encoding="ascii")))
    return max(1.0, free * (1 - RESERVE_SHARE_CPU) / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size < 1000 * 2**30 else f"{size / 2**30:,.0f} GiB"


def _kept_by_pretraining(config: ModelConfig, on_cpu: bool) -> float:
    """Bytes of a clip, when the loss's gradient has just been made."""
    size, tokens, visible = config.dimensions, config.num_tokens, config.num_visible
    decoded = (visible + config.num_reconstructed) * size.decoder_width
    sampled = _kept_by_sampler(config)
    blocks, pred = DECODER * size.decoder_depth, config.num_reconstructed * config.patch_values
    if config.activation_checkpointing:
        blocks, sampled = DECODER + BLOCK_INPUT * (size.decoder_depth - 1), BLOCK_INPUT * tokens * size.encoder_width
    kept = decoded * (blocks + 5.2) + pred * (16 if on_cpu else 4) + sampled
    return kept + visible * (_encoder_block(config) * size.encoder_depth + 4 * config.patch_values)


def _kept_by_sampler(config: ModelConfig) -> float:
    if config.masking != "adaptive":
        return 0
    channels = config.num_tokens * config.sampler_dimension
    kept = MLP_SAMPLER if config.sampler == "mlp" else SAMPLER + MORE_SAMPLER * (config.sampler_depth - 1)
    return channels * kept * (1 if config.sampler_autocast else FP32_SAMPLER)


def _encoder_block(config: ModelConfig) -> float:
    return ENCODER * config.dimensions.encoder_width


def _and_else(config: TrainConfig) -> str:
    also = ", or set model.activation_checkpointing=true" if config.task == "pretrain" else ""
    return (" (a step stays one of global_batch clips)" if config.global_batch else "") + (
        also if not config.model.activation_checkpointing else ""
    )

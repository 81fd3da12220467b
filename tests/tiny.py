"""A training run of two seconds on a CPU: `parse([*TINY, f"data.shards={shards}", ...])`."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from adamae.model.config import ModelConfig
from adamae.model.encoder import VideoEncoder
from adamae.model.weights import pretrained

TINY = [
    "model.size=tiny",
    "model.num_frames=4",
    "model.image_size=32",
    "model.patch_size=8",
    "model.mask_ratio=0.75",
    "data.frame_stride=2",
    "batch_size=4",
    "steps=6",
    "precision=fp32",
    "optimizer.base_lr=0.06",
    "optimizer.warmup_ratio=0",
    "device=cpu",
    "log_every=1",
    "data.num_workers=1",
    "evaluation.every=null",
    "checkpoint_every=3",
]


def write_random_teacher(config: ModelConfig, folder: Path) -> str:
    """Write an encoder of the model's own size, with random weights; return its path."""
    file = folder / f"teacher_{config.size}.safetensors"
    config = replace(config, target="pixels", teacher="", loss="mse")
    pretrained.save(file, VideoEncoder(config).state_dict(), pretrained.make_metadata(config))
    return str(file)


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Change all parameters: with biases of 0 and norms of 1, mistakes would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(torch.randn(value.shape, generator=generator) * 0.1)

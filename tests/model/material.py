"""What the tests of models build them from."""

from typing import Any

import torch
from torch import Tensor

from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.masking import Mask

# 4 frames of 32×32 in patches of 2×8×8 are 2·4·4 = 32 tokens: a model that runs in milliseconds.
SMALL: dict[str, Any] = {
    "encoder_width": 48,
    "encoder_depth": 2,
    "encoder_heads": 3,
    "decoder_width": 32,
    "decoder_depth": 2,
    "decoder_heads": 2,
    "num_frames": 4,
    "image_size": 32,
    "patch_size": 8,
    "mask_ratio": 0.75,
}


def small(**changes: Any) -> ModelConfig:
    return ModelConfig(**(SMALL | changes))


def random_clip(config: ModelConfig, batch_size: int = 2, seed: int = 0) -> Tensor:
    shape = (batch_size, config.num_frames, *config.frame_size, 3)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_ids(config: ModelConfig, batch_size: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split the tokens at random; return visible_ids and masked_ids, ascending."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(config.num_tokens, generator=generator) for _ in range(batch_size)]
    order = torch.stack(rows)
    visible = order[:, : config.num_visible].sort().values
    masked = order[:, config.num_visible :].sort().values
    return visible, masked


def give_ids(model: AdaMAE, visible_ids: Tensor, masked_ids: Tensor) -> None:
    """Let the model mask these tokens, whatever its sampler would choose."""
    strategy = model.token_sampler

    def sample(logits: Tensor, seed: int, offset: int) -> Mask:
        log_probs = logits.log_softmax(-1) if strategy.learns else None
        return Mask(visible_ids, masked_ids, log_probs)

    strategy.sample = sample  # type: ignore[method-assign, assignment]


def close(value: Tensor, expected: Tensor, name: str = "", within: float = 1e-5) -> None:
    """Compare relative to the largest of the expected values."""
    atol = within * max(expected.abs().max().item(), 1e-3)
    expected = expected.to(value.dtype)

    def describe(text: str) -> str:
        return f"{name}: {text}"

    torch.testing.assert_close(value.cpu(), expected, rtol=0, atol=atol, msg=describe)

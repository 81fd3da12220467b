"""Infers a model's configuration from the names and shapes of its weights."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

from common.errors import InputError
from model.config import SIZES, ModelConfig
from model.state_dict import StateDict

TOKENIZER = "tokenizer.projection.weight"
LEARNED_POSITIONS = "token_sampler.positions"
TUBELETS = (2, 4, 1, 3, 8)  # the usual ones first


def infer_config(state_dict: StateDict, num_frames: int = 16, like: ModelConfig | None = None) -> ModelConfig:
    """Infer the configuration: widths and depths from names and shapes, with defaults where a tensor is missing.

    Numbers of heads are not in the weights: they are those of the size with these widths, else of `like` with these
    widths, else one for 64 channels. Nor is the clip shape: it is that of `like` if that makes as many tokens of it,
    else `num_frames` square frames.
    """

    def rows(name: str, default: int) -> int:
        return state_dict[name].shape[0] if name in state_dict else default

    def count(prefix: str) -> int:
        return max(1, len({name[len(prefix) :].split(".")[0] for name in state_dict if name.startswith(prefix)}))

    def dimensions(part: str, default_width: int) -> dict[str, Any]:
        width = rows(f"{part}.blocks.0.norm1.weight", default_width)
        sizes = [size._asdict() for size in (*([] if like is None else [like.dimensions]), *SIZES.values())]
        heads = {size[f"{part}_width"]: size[f"{part}_heads"] for size in sizes}.get(width, max(1, width // 64))
        return {f"{part}_width": width, f"{part}_depth": count(f"{part}.blocks."), f"{part}_heads": heads}

    encoder = dimensions("encoder", 768)
    adaptive = any(name.startswith("token_sampler.") for name in state_dict)
    values = state_dict[TOKENIZER].shape[-1] if TOKENIZER in state_dict else 1536
    tubelet_size, patch_size, in_channels = _factor_patch(values)
    num_tokens = rows(LEARNED_POSITIONS, 0)
    config = ModelConfig(
        **encoder,
        **dimensions("decoder", 384),
        tubelet_size=tubelet_size,
        patch_size=patch_size,
        in_channels=in_channels,
        num_frames=num_frames,
        image_size=14 * patch_size,
        masking="adaptive" if adaptive else "tube",
        mask_ratio=0.95 if adaptive else 0.9,
        sampler="mlp" if "token_sampler.body.0.weight" in state_dict else "mha",
        sampler_depth=count("token_sampler.body."),
        sampler_width=rows("token_sampler.projection.weight", encoder["encoder_width"]),
    )
    if like is not None and like.patch_values == values and num_tokens in (0, like.num_tokens):
        patches = ("tubelet_size", "patch_size", "in_channels")
        names = ("num_frames", "image_size", *patches, "differences", "positions", "masking", "mask_ratio")
        return replace(config, **{name: getattr(like, name) for name in names})
    time = config.grid[0]
    side = math.isqrt(num_tokens // time)
    if time * side**2 != num_tokens:
        raise InputError(
            f"these weights are for {num_tokens} tokens, which are not {time} square token frames:"
            f" give the number of frames they were trained with (now {num_frames}); `python export.py import` writes it"
            " into its output"
        )
    return replace(config, image_size=side * patch_size) if num_tokens else config


def _factor_patch(num_values: int) -> tuple[int, int, int]:
    """Find tubelet size, patch size and channels of `num_values`: RGB and the usual tubelets first, then grayscale."""
    for channels, tubelet_size in product((3, 1), TUBELETS):
        side = math.isqrt(num_values // (channels * tubelet_size))
        if side and channels * tubelet_size * side**2 == num_values:
            return tubelet_size, side, channels
    raise InputError(f"these weights are for patches of {num_values} values: those are no square patches, RGB or gray")

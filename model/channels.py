"""What a model makes of a clip before anything else: grayscale, for one of one channel, and differences of frames."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.config import ModelConfig

Clip = UInt8[Tensor, "B T H W C"]  # C: 3, RGB as decoded, or as many as model.in_channels
LUMA = (
    77,
    150,
    29,
)  # 256ths: the weights .299, .587 and .114 of ITU-R BT.601, in whole numbers, alike on all devices
STILL, STRENGTH = (
    115,
    40,
)  # of 255: no change, about ImageNet's mean; the deviation of changes, .7 of ImageNet's


def check_channels(channels: int, in_channels: int) -> None:
    """Raise InputError where a model of `in_channels` does not take clips of `channels`."""
    if in_channels != channels and (channels, in_channels) != (3, 1):
        raise InputError(
            f"model.in_channels is {in_channels}, and the clips of data.shards have {channels}: set"
            f" model.in_channels={channels}" + (", or 1 for grayscale" if channels == 3 else "")
        )


def prepare_clip(clip: Clip, config: ModelConfig) -> Clip:
    """Make what the model sees of a clip: its channels, and with `model.differences` what changes."""
    clip = adapt_channels(clip, config.in_channels)
    return compute_differences(clip) if config.differences else clip


def compute_differences(clip: Clip) -> Clip:
    """Compute each frame's difference to the next one, as strong in every clip; the last frame repeats the one before.

    RGB differences (Wang et al. 2016, arXiv 1608.00859) hide the place, by heart of which few videos are learned.
    """
    change = clip.float().diff(dim=1)
    rms = (
        change.square().mean(dim=(1, 2, 3, 4), keepdim=True).sqrt().clamp_min(1)
    )  # noise alone stays weak
    scaled = (change / rms * STRENGTH + STILL).round().clamp(0, 255).to(clip.dtype)
    return torch.cat((scaled, scaled[:, -1:]), dim=1)


def measure_change(now: Clip, then: Clip) -> Int[Tensor, "B T H W"]:
    """Sum the absolute differences of a pixel's channels, without a copy in another type: floats would take four times
    the bytes."""
    return (torch.maximum(now, then) - torch.minimum(now, then)).sum(dim=4, dtype=torch.int32)


def adapt_channels(clip: Clip, in_channels: int) -> Clip:
    """Convert RGB to grayscale for a model of one channel.

    Raises InputError where the channels do not match. Grayscale is (77 R + 150 G + 29 B + 128) / 256, rounded down.
    """
    channels = clip.shape[-1]
    if channels == in_channels:
        return clip
    if (channels, in_channels) != (3, 1):
        raise InputError(f"the clip has {channels} channels, and the model takes {in_channels}")
    red, green, blue = (
        weight * plane for weight, plane in zip(LUMA, clip.int().unbind(-1), strict=True)
    )
    return ((red + green + blue + 128) >> 8).to(clip.dtype)[..., None]

"""What a model makes of a clip first: grayscale, for one channel, and differences of frames."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.config import ModelConfig

# C: 3, RGB as decoded, or as many as model.in_channels.
Clip = UInt8[Tensor, "B T H W C"]

# 0.299, 0.587 and 0.114 of ITU-R BT.601 as 256ths: sums of integers are equal on all devices.
LUMA = (77, 150, 29)
# Of 255. No change is about ImageNet's mean; changes have a deviation of 0.7 of ImageNet's.
STILL = 115
STRENGTH = 40


def check_channels(channels: int, in_channels: int) -> None:
    """Raise InputError where a model of `in_channels` does not take clips of `channels`."""
    if takes_channels(in_channels, channels):
        return
    advice = f"set model.in_channels={channels}"
    if channels == 3:
        advice += ", or 1 for grayscale"
    raise InputError(
        f"model.in_channels is {in_channels}, and the clips of data.shards have {channels}:"
        f" {advice}"
    )


def takes_channels(in_channels: int, channels: int) -> bool:
    """Return whether a model of `in_channels` takes clips of `channels`, perhaps as grayscale."""
    is_gray_from_rgb = channels == 3 and in_channels == 1
    return channels == in_channels or is_gray_from_rgb


def prepare_clip(clip: Clip, config: ModelConfig) -> Clip:
    """Make what the model sees of a clip: its channels, and with `model.differences` what changes.

    Raise InputError where the channels do not match.
    """
    clip = adapt_channels(clip, config.in_channels)
    if config.differences:
        return compute_differences(clip)
    return clip


def compute_differences(clip: Clip) -> Clip:
    """Compute each frame's difference to the next one, equally strong in every clip.

    The last frame repeats the one before. RGB differences (Wang et al. 2016, arXiv 1608.00859) hide
    the scene, which a model learns by heart where there are few videos.
    """
    change = clip.float().diff(dim=1)
    rms = change.square().mean(dim=(1, 2, 3, 4), keepdim=True).sqrt()
    # At least one of 255 levels, so that noise alone stays weak.
    rms = rms.clamp_min(1)
    # In place: allocating a tensor for each of five operations takes longer than they do.
    change.div_(rms).mul_(STRENGTH).add_(STILL).round_().clamp_(0, 255)
    scaled = change.to(clip.dtype)
    return torch.cat((scaled, scaled[:, -1:]), dim=1)


def measure_change(now: Clip, then: Clip) -> Int[Tensor, "B T H W"]:
    """Sum the absolute differences of a pixel's channels."""
    # In uint8: a copy in floats would take four times the bytes.
    change = torch.maximum(now, then) - torch.minimum(now, then)
    return change.sum(dim=4, dtype=torch.int32)


def adapt_channels(clip: Clip, in_channels: int) -> Clip:
    """Convert RGB to grayscale for a model of one channel; other clips stay as they are.

    Grayscale is (77 R + 150 G + 29 B + 128) / 256, rounded down. Raise InputError where the
    channels do not match.
    """
    channels = clip.shape[-1]
    if not takes_channels(in_channels, channels):
        raise InputError(f"the clip has {channels} channels, and the model takes {in_channels}")
    if channels == in_channels:
        return clip
    red, green, blue = clip.unbind(-1)
    # In place: allocating 32 bits for each channel and sum takes longer than the arithmetic.
    sum_256 = red.int().mul_(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return sum_256.add_(128).bitwise_right_shift_(8).to(clip.dtype)[..., None]

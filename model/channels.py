"""Channels of clips: videos are RGB, from which a model of one channel makes grayscale itself."""

from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError

LUMA = (77, 150, 29)  # 256ths: the weights .299, .587 and .114 of ITU-R BT.601, in whole numbers, alike on all devices


def check_channels(channels: int, in_channels: int) -> None:
    """Raise InputError where a model of `in_channels` does not take clips of `channels`."""
    if in_channels != channels and (channels, in_channels) != (3, 1):
        raise InputError(
            f"model.in_channels is {in_channels}, and the clips of data.shards have {channels}: set"
            f" model.in_channels={channels}" + (", or 1 for grayscale" if channels == 3 else "")
        )


def adapt_channels(clip: UInt8[Tensor, "B T H W C"], in_channels: int) -> UInt8[Tensor, "B T H W c"]:
    """Convert RGB to grayscale for a model of one channel.

    Raises InputError where the channels do not match. Grayscale is (77 R + 150 G + 29 B + 128) / 256, rounded down.
    """
    channels = clip.shape[-1]
    if channels == in_channels:
        return clip
    if (channels, in_channels) != (3, 1):
        raise InputError(f"the clip has {channels} channels, and the model takes {in_channels}")
    red, green, blue = (weight * plane for weight, plane in zip(LUMA, clip.int().unbind(-1), strict=True))
    return ((red + green + blue + 128) >> 8).to(clip.dtype)[..., None]

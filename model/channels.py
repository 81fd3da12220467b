"""Channels of clips: videos are RGB, from which a model of one channel makes grayscale itself."""

from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError

LUMA = (77, 150, 29)  # 256ths: the weights .299, .587 and .114 of ITU-R BT.601, in whole numbers, alike on all devices


def check_channels(channels: int, in_channels: int, motion_channel: bool = False) -> None:
    """Raise InputError where a model of `in_channels` does not take clips of `channels`, one of them a motion map."""
    if motion_channel:
        if channels != in_channels + 1:
            raise InputError(
                f"model.motion_channel is true, and the clips of data.shards have {channels} channels instead of"
                f" {in_channels} and a map of motion: make them with shard_tools/synthetic_videos.py --motion-channel"
            )
        return
    if in_channels != channels and (channels, in_channels) != (3, 1):
        raise InputError(
            f"model.in_channels is {in_channels}, and the clips of data.shards have {channels}: set"
            f" model.in_channels={channels}" + (", or 1 for grayscale" if channels == 3 else "")
        )


def adapt_channels(
    clip: UInt8[Tensor, "B T H W C"], in_channels: int, motion_channel: bool = False
) -> UInt8[Tensor, "B T H W c"]:
    """Drop the motion map, where the last channel is one, and convert RGB to grayscale for a model of one channel.

    Raises InputError where the channels do not match. Grayscale is (77 R + 150 G + 29 B + 128) / 256, rounded down.
    """
    if motion_channel:
        clip = clip[..., :-1].contiguous()
    channels = clip.shape[-1]
    if channels == in_channels:
        return clip
    if (channels, in_channels) != (3, 1):
        raise InputError(f"the clip has {channels} channels, and the model takes {in_channels}")
    red, green, blue = (weight * plane for weight, plane in zip(LUMA, clip.int().unbind(-1), strict=True))
    return ((red + green + blue + 128) >> 8).to(clip.dtype)[..., None]

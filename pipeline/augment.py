"""RandAugment and random erasing as the plan asks for them: on the clip's device, in uint8, alike in all its frames."""

import math
from collections.abc import Callable

import torch
import torchvision.transforms.v2.functional as F
from jaxtyping import UInt8
from torch import Tensor

from pipeline.changes import Box, Change

GREY = [128.0]  # what is shown where a shifted or turned frame has nothing

Frames = UInt8[Tensor, "T C H W"]


def _moved(frames: Frames, angle: float = 0, x: float = 0, y: float = 0, shear: tuple[float, float] = (0, 0)) -> Frames:
    shift = [x * frames.shape[-1], y * frames.shape[-2]]
    degrees = [math.degrees(math.atan(part)) for part in shear]
    return F.affine(frames, angle, shift, 1.0, degrees, F.InterpolationMode.BILINEAR, fill=GREY)


def _solarized(frames: Frames, threshold: int) -> Frames:
    return torch.where(frames.to(torch.int16) >= threshold, 255 - frames, frames)


def _solarized_below(frames: Frames, amount: int) -> Frames:
    return torch.where(frames < 128, (frames.to(torch.int16) + amount).clamp(0, 255).to(torch.uint8), frames)


OPERATIONS: dict[str, Callable[[Frames, float], Frames]] = {
    "autocontrast": lambda frames, s: F.autocontrast(frames),
    "equalize": lambda frames, s: F.equalize(frames),
    "invert": lambda frames, s: F.invert(frames),
    "rotate": lambda frames, s: _moved(frames, angle=30 * s),
    "posterize": lambda frames, s: F.posterize(frames, 4 - int(4 * abs(s))) if int(4 * abs(s)) < 4 else frames & 0x80,
    "solarize": lambda frames, s: _solarized(frames, 256 - int(256 * abs(s))),
    "solarize_add": lambda frames, s: _solarized_below(frames, min(128, int(110 * abs(s)))),
    "color": lambda frames, s: F.adjust_saturation(frames, max(0.1, 1 + 0.9 * s)),
    "contrast": lambda frames, s: F.adjust_contrast(frames, max(0.1, 1 + 0.9 * s)),
    "brightness": lambda frames, s: F.adjust_brightness(frames, max(0.1, 1 + 0.9 * s)),
    "sharpness": lambda frames, s: F.adjust_sharpness(frames, max(0.1, 1 + 0.9 * s)),
    "shear_x": lambda frames, s: _moved(frames, shear=(0.3 * s, 0)),
    "shear_y": lambda frames, s: _moved(frames, shear=(0, 0.3 * s)),
    "translate_x": lambda frames, s: _moved(frames, x=0.45 * s),
    "translate_y": lambda frames, s: _moved(frames, y=0.45 * s),
}


def augmented(
    clip: UInt8[Tensor, "T H W C"], changes: tuple[Change, ...], box: Box | None, seed: int
) -> UInt8[Tensor, "T H W C"]:
    """The clip with `changes` made one after the other, and noise of ImageNet's colours in `box`."""
    frames = clip.permute(0, 3, 1, 2)
    for change in changes:
        frames = OPERATIONS[change.name](frames, change.strength)
    if box is not None:
        frames = frames.clone()
        side_y, side_x = frames.shape[-2:]
        top, left = int(box.top * side_y), int(box.left * side_x)
        erased = frames[
            :, :, top : top + max(1, int(box.height * side_y)), left : left + max(1, int(box.width * side_x))
        ]
        generator = torch.Generator(clip.device).manual_seed(seed)
        noise = torch.randn(erased.shape, generator=generator, device=clip.device)
        erased.copy_((noise * 58 + 116).clamp(0, 255))
    return frames.permute(0, 2, 3, 1)

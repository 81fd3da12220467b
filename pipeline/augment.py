"""RandAugment and random erasing as planned: on the clips' device, in uint8, the same for all frames of a clip.

Operations are torchvision's, except where it copies a small table to the device for every clip: the host would wait
until the GPU has done all that is queued. The tables of a batch are copied at once, from pinned memory.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional
import torchvision.transforms.v2.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from adamae.common.devices import to_device
from adamae.pipeline.decoding.decode_worker import LoadedClip
from adamae.pipeline.planning.augmentations import EraseBox
from adamae.pipeline.planning.plan import PlanRow

GRAY = 128.0  # fills what a shifted or rotated frame leaves empty
NOISE_MEAN, NOISE_STD = 116, 58  # ImageNet's, in gray levels

Frames = UInt8[Tensor, "T C H W"]


def augment(
    clips: UInt8[Tensor, "B T H W C"], rows: Sequence[PlanRow | LoadedClip]
) -> UInt8[Tensor, "B T H W C"]:
    """Apply each clip's operations in order, then fill its erased box with noise of ImageNet's statistics."""
    aspect = clips.shape[2] / clips.shape[3]
    warps = [
        AFFINE[name](strength, aspect)
        for row in rows
        for name, strength in row.augment_ops
        if name in AFFINE
    ]
    matrices = iter(
        to_device([number for matrix in warps for number in matrix], clips.device).split(6)
    )
    augmented = []
    for clip, row in zip(clips, rows, strict=True):
        frames = clip.permute(0, 3, 1, 2)
        for name, strength in row.augment_ops:
            frames = (
                warp(frames, next(matrices))
                if name in AFFINE
                else OPERATIONS[name](frames, strength)
            )
        if row.erase_box is not None:
            frames = erase(frames, row.erase_box, seed=row.position)
        augmented.append(frames.permute(0, 2, 3, 1))
    return torch.stack(augmented)


def erase(frames: Frames, box: EraseBox, seed: int) -> Frames:
    frames = frames.clone()
    height, width = frames.shape[-2:]
    top, left = int(box.top * height), int(box.left * width)
    erased = frames[
        :,
        :,
        top : top + max(1, int(box.height * height)),
        left : left + max(1, int(box.width * width)),
    ]
    generator = torch.Generator(frames.device).manual_seed(seed)
    noise = torch.randn(erased.shape, generator=generator, device=frames.device)
    erased.copy_((noise * NOISE_STD + NOISE_MEAN).clamp(0, 255))
    return frames


def warp(frames: Frames, matrix: Float[Tensor, "6"]) -> Frames:
    """Sample each pixel bilinearly where the affine matrix, in halves of the sides from the center, points to."""
    images = frames.flatten(0, 1)[None].float()
    inside = torch.ones_like(images[:, :1])
    grid = torch.nn.functional.affine_grid(
        matrix.view(1, 2, 3), list(inside.shape), align_corners=False
    )
    sampled = torch.nn.functional.grid_sample(
        torch.cat((images, inside), 1), grid, align_corners=False
    )
    images, inside = sampled[:, :-1], sampled[:, -1:]
    return images.sub_(GRAY).mul_(inside).add_(GRAY).round_().to(torch.uint8).view(frames.shape)


def sharpen(frames: Frames, strength: float) -> Frames:
    """Blend with a blurred image, but for the border."""
    sharp = frames.float()
    kernel = torch.full((frames.shape[1], 1, 3, 3), 1 / 13, device=frames.device)
    kernel[:, :, 1, 1].fill_(5 / 13)
    change = torch.nn.functional.conv2d(sharp, kernel, groups=frames.shape[1]).round_()
    inner = sharp[..., 1:-1, 1:-1]
    inner.add_(change.sub_(inner), alpha=1 - blend_factor(strength))
    return sharp.clamp_(0, 255).to(torch.uint8)


def solarize(frames: Frames, strength: float) -> Frames:
    threshold = 256 - int(256 * abs(strength))
    return F.solarize(frames, threshold) if threshold < 256 else frames  # which torchvision refuses


def solarize_add(frames: Frames, strength: float) -> Frames:
    lighter = (
        (frames.to(torch.int16) + min(128, int(110 * abs(strength)))).clamp_(0, 255).to(torch.uint8)
    )
    return torch.where(frames < 128, lighter, frames)


def rotation(strength: float, aspect: float) -> tuple[float, ...]:
    angle = math.radians(30 * strength)
    return (
        math.cos(angle),
        math.sin(angle) * aspect,
        0,
        -math.sin(angle) / aspect,
        math.cos(angle),
        0,
    )


def blend_factor(strength: float) -> float:
    return max(0.1, 1 + 0.9 * strength)


OPERATIONS: dict[str, Callable[[Frames, float], Frames]] = {
    "autocontrast": lambda frames, _: F.autocontrast(frames),
    "equalize": lambda frames, _: F.equalize(frames),
    "invert": lambda frames, _: F.invert(frames),
    "posterize": lambda frames, strength: F.posterize(frames, max(1, 4 - int(4 * abs(strength)))),
    "solarize": solarize,
    "solarize_add": solarize_add,
    "color": lambda frames, strength: F.adjust_saturation(frames, blend_factor(strength)),
    "contrast": lambda frames, strength: F.adjust_contrast(frames, blend_factor(strength)),
    "brightness": lambda frames, strength: F.adjust_brightness(frames, blend_factor(strength)),
    "sharpness": sharpen,
}
# By strength and height over width.
AFFINE: dict[str, Callable[[float, float], tuple[float, ...]]] = {
    "rotate": rotation,
    "shear_x": lambda strength, aspect: (1, 0.3 * strength * aspect, 0, 0, 1, 0),
    "shear_y": lambda strength, aspect: (1, 0, 0, 0.3 * strength / aspect, 1, 0),
    "translate_x": lambda strength, aspect: (1, 0, -0.9 * strength, 0, 1, 0),
    "translate_y": lambda strength, aspect: (1, 0, 0, 0, 1, -0.9 * strength),
}

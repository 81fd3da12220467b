"""RandAugment and random erasing as planned, the same for all frames of a clip.

They are done on the clips' device, in uint8.

Operations are torchvision's, except where it copies a small table to the device for every clip: the
host would wait until the GPU has done all that is queued. The tables of a batch are copied at once,
from pinned memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional
import torchvision.transforms.v2.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from adamae.common.devices import to_device
from adamae.pipeline.decoding.chunks import LoadedClip
from adamae.pipeline.planning.augmentations import AugmentOp, EraseBox
from adamae.pipeline.planning.plan import PlanRow

# Fills what a shifted or rotated frame leaves empty.
GRAY = 128.0
# ImageNet's, in gray levels.
NOISE_MEAN = 116
NOISE_STD = 58

Frames = UInt8[Tensor, "T C H W"]
# The numbers a, b, c, d, e, f: the pixel at (x, y) is read from (a x + b y + c, d x + e y + f).
# Both are counted from the center of the frame in halves of its sides, so its corners are at ±1.
Matrix = tuple[float, float, float, float, float, float]


def augment(
    clips: UInt8[Tensor, "B T H W C"], rows: Sequence[PlanRow | LoadedClip]
) -> UInt8[Tensor, "B T H W C"]:
    """Apply each clip's operations in order, then fill its erased box with noise.

    The noise has ImageNet's statistics, and is a function of the clip's position.
    """
    height_to_width = clips.shape[2] / clips.shape[3]
    numbers: list[float] = []
    for row in rows:
        for name, strength in row.augment_ops:
            if name in AFFINE:
                numbers += AFFINE[name](strength, height_to_width)
    # One copy for the whole batch, in the order in which the operations below use them.
    matrices = iter(to_device(numbers, clips.device).split(6))
    augmented = []
    for clip, row in zip(clips, rows, strict=True):
        frames = clip.permute(0, 3, 1, 2)
        for operation in row.augment_ops:
            frames = _apply(frames, operation, matrices)
        if row.erase_box is not None:
            frames = erase(frames, row.erase_box, seed=row.position)
        augmented.append(frames.permute(0, 2, 3, 1))
    return torch.stack(augmented)


def _apply(frames: Frames, operation: AugmentOp, matrices: Iterator[Float[Tensor, "6"]]) -> Frames:
    if operation.name in AFFINE:
        return warp(frames, next(matrices))
    return OPERATIONS[operation.name](frames, operation.strength)


def erase(frames: Frames, box: EraseBox, seed: int) -> Frames:
    """Fill a box, the same in all frames, with noise."""
    frames = frames.clone()
    height, width = frames.shape[-2:]
    top = int(box.top * height)
    left = int(box.left * width)
    # A box of a small frame may be thinner than a pixel.
    bottom = top + max(1, int(box.height * height))
    right = left + max(1, int(box.width * width))
    erased = frames[:, :, top:bottom, left:right]
    generator = torch.Generator(frames.device).manual_seed(seed)
    noise = torch.randn(erased.shape, generator=generator, device=frames.device)
    erased.copy_((noise * NOISE_STD + NOISE_MEAN).clamp(0, 255))
    return frames


def warp(frames: Frames, matrix: Float[Tensor, "6"]) -> Frames:
    """Read each pixel bilinearly from where the matrix says; see Matrix.

    What lies outside the frame is gray.
    """
    images = frames.flatten(0, 1)[None].float()
    # One channel more, of ones: it comes back as the fraction of each pixel that lies in the frame.
    inside = torch.ones_like(images[:, :1])
    grid = torch.nn.functional.affine_grid(
        matrix.view(1, 2, 3), list(inside.shape), align_corners=False
    )
    sampled = torch.nn.functional.grid_sample(
        torch.cat((images, inside), 1), grid, align_corners=False
    )
    images = sampled[:, :-1]
    inside = sampled[:, -1:]
    images = images.sub_(GRAY).mul_(inside).add_(GRAY)
    return images.round_().to(torch.uint8).view(frames.shape)


def rotate(strength: float, height_to_width: float) -> Matrix:
    """Rotate by up to 30 degrees.

    In halves of sides, the matrix depends on the frame's proportions.
    """
    angle = math.radians(30 * strength)
    cos = math.cos(angle)
    sin = math.sin(angle)
    return (cos, sin * height_to_width, 0, -sin / height_to_width, cos, 0)


def shear_x(strength: float, height_to_width: float) -> Matrix:
    return (1, 0.3 * strength * height_to_width, 0, 0, 1, 0)


def shear_y(strength: float, height_to_width: float) -> Matrix:
    return (1, 0, 0, 0.3 * strength / height_to_width, 1, 0)


def translate_x(strength: float, height_to_width: float) -> Matrix:
    """Shift by up to 45 % of the width, which is 0.9 of its half."""
    return (1, 0, -0.9 * strength, 0, 1, 0)


def translate_y(strength: float, height_to_width: float) -> Matrix:
    return (1, 0, 0, 0, 1, -0.9 * strength)


def sharpen(frames: Frames, strength: float) -> Frames:
    """Blend with a blurred image, but for the border."""
    num_channels = frames.shape[1]
    sharp = frames.float()
    # PIL's ImageFilter.SMOOTH: 5 at the center, 1 around it, over their sum.
    kernel = torch.full((num_channels, 1, 3, 3), 1 / 13, device=frames.device)
    kernel[:, :, 1, 1].fill_(5 / 13)
    blurred = torch.nn.functional.conv2d(sharp, kernel, groups=num_channels).round_()
    # A view: the border, where the kernel does not fit, stays as it is.
    inner = sharp[..., 1:-1, 1:-1]
    change = blurred.sub_(inner)
    inner.add_(change, alpha=1 - blend_factor(strength))
    return sharp.clamp_(0, 255).to(torch.uint8)


def posterize(frames: Frames, strength: float) -> Frames:
    """Keep 1 to 4 bits of each value."""
    num_bits = max(1, 4 - int(4 * abs(strength)))
    return F.posterize(frames, num_bits)


def solarize(frames: Frames, strength: float) -> Frames:
    """Invert values from a threshold on."""
    threshold = 256 - int(256 * abs(strength))
    # torchvision refuses a threshold beyond the largest value, which would change nothing.
    if threshold == 256:
        return frames
    return F.solarize(frames, threshold)


def solarize_add(frames: Frames, strength: float) -> Frames:
    """Add up to 110 to dark values."""
    added = min(128, int(110 * abs(strength)))
    lighter = (frames.to(torch.int16) + added).clamp_(0, 255).to(torch.uint8)
    return torch.where(frames < 128, lighter, frames)


def blend_factor(strength: float) -> float:
    """Return by which factor a property of the picture changes: 0.1 to 1.9, 1 for none."""
    return max(0.1, 1 + 0.9 * strength)


OPERATIONS: dict[str, Callable[[Frames, float], Frames]] = {
    "autocontrast": lambda frames, _: F.autocontrast(frames),
    "equalize": lambda frames, _: F.equalize(frames),
    "invert": lambda frames, _: F.invert(frames),
    "posterize": posterize,
    "solarize": solarize,
    "solarize_add": solarize_add,
    "color": lambda frames, strength: F.adjust_saturation(frames, blend_factor(strength)),
    "contrast": lambda frames, strength: F.adjust_contrast(frames, blend_factor(strength)),
    "brightness": lambda frames, strength: F.adjust_brightness(frames, blend_factor(strength)),
    "sharpness": sharpen,
}
# Of strength and height to width.
AFFINE: dict[str, Callable[[float, float], Matrix]] = {
    "rotate": rotate,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
}

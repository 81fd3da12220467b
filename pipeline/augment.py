"""RandAugment and random erasing as planned: on the clips' device, in uint8, the same for all frames of a clip.

Equal operations are applied to several clips at once. Their parameters come to the device in one copy from pinned
memory: a small table copied per clip, as in torchvision, would wait until the GPU has done all that is queued.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional
import torchvision.transforms.v2.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from common.devices import to_device
from pipeline.planning.augmentations import AugmentOp, EraseBox
from pipeline.planning.plan import PlanRow

GRAY = 128.0  # fills what a shifted or rotated frame leaves empty
MAX_CLIPS = 8  # at once: an operation needs 37 MiB per clip in fp32 (16 frames of 224×224)

Frames = UInt8[Tensor, "N T C H W"]
Numbers = tuple[float, ...]


class Operation(NamedTuple):
    """What is done to several clips; operations with the same `apply` are done together."""

    apply: Callable[[Frames, list[Numbers], Float[Tensor, "N X"]], Frames]  # parameters on host and device
    parameters: Callable[[float, int, int], Numbers] = lambda strength, height, width: ()


class OperationBatch(NamedTuple):
    """Clips to which the same operation is applied next."""

    apply: Callable[..., Frames]
    clips: list[int]
    parameters: list[Numbers]


def augment(clips: UInt8[Tensor, "B T H W C"], rows: Sequence[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
    """Apply each clip's operations in order, then fill its erased box with noise of ImageNet's statistics."""
    frames = list(clips.permute(0, 1, 4, 2, 3))
    batches = batch_operations([row.augment_ops for row in rows], *frames[0].shape[-2:])
    sizes = [sum(map(len, batch.parameters)) for batch in batches]
    every = [float(number) for batch in batches for numbers in batch.parameters for number in numbers]
    for batch, numbers in zip(batches, to_device(every, clips.device).split(sizes), strict=True):
        stacked = torch.stack([frames[clip] for clip in batch.clips])
        changed = batch.apply(stacked, batch.parameters, numbers.view(len(batch.clips), -1))
        for clip, result in zip(batch.clips, changed, strict=True):
            frames[clip] = result
    for clip, row in enumerate(rows):
        if row.erase_box is not None:
            frames[clip] = _erase(frames[clip], row.erase_box, seed=row.position)
    return torch.stack([clip.permute(0, 2, 3, 1) for clip in frames])


def batch_operations(ops: Sequence[tuple[AugmentOp, ...]], height: int, width: int) -> list[OperationBatch]:
    """Group equal operations: first the first one of every clip, then the second one, ..."""
    batches: list[OperationBatch] = []
    for place in range(max(map(len, ops), default=0)):
        open_batches: dict[Callable[..., Frames], OperationBatch] = {}
        for clip, own in enumerate(ops):
            if place >= len(own):
                continue
            name, strength = own[place]
            operation = OPERATIONS[name]
            batch = open_batches.get(operation.apply)
            if batch is None or len(batch.clips) == MAX_CLIPS:
                batch = open_batches[operation.apply] = OperationBatch(operation.apply, [], [])
                batches.append(batch)
            batch.clips.append(clip)
            batch.parameters.append(operation.parameters(strength, height, width))
    return batches


def _erase(frames: UInt8[Tensor, "T C H W"], box: EraseBox, seed: int) -> UInt8[Tensor, "T C H W"]:
    frames = frames.clone()
    height, width = frames.shape[-2:]
    top, left = int(box.top * height), int(box.left * width)
    erased = frames[:, :, top : top + max(1, int(box.height * height)), left : left + max(1, int(box.width * width))]
    generator = torch.Generator(frames.device).manual_seed(seed)
    noise = torch.randn(erased.shape, generator=generator, device=frames.device)
    erased.copy_((noise * 58 + 116).clamp(0, 255))
    return frames


def _warp(frames: Frames, _: list[Numbers], matrices: Float[Tensor, "N 6"]) -> Frames:
    """Sample each pixel bilinearly where the affine `matrices`, in pixels from the center, point to."""
    height, width = frames.shape[-2:]
    base = matrices.new_empty(height, width, 3)
    base[..., 0].copy_(torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=frames.device))
    base[..., 1].copy_(torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=frames.device)[:, None])
    base[..., 2].fill_(1)
    scaled = matrices.view(-1, 2, 3).transpose(1, 2).clone()  # grid_sample's coordinates run from -1 to 1
    for axis, side in enumerate((width, height)):
        scaled[..., axis].div_(scaled.new_full((), side / 2))  # dividing by a Python number, a GPU would multiply
    grid = base.view(1, height * width, 3).expand(len(frames), -1, -1).bmm(scaled).view(-1, height, width, 2)
    images = frames.flatten(1, 2).float()
    inside = torch.ones_like(images[:, :1])
    sampled = torch.nn.functional.grid_sample(torch.cat((images, inside), 1), grid, align_corners=False)
    images, inside = sampled[:, :-1], sampled[:, -1:]
    return images.sub_(GRAY).mul_(inside).add_(GRAY).round_().to(torch.uint8).view(frames.shape)


def _blend(frames: Frames, other: Tensor, factors: list[Numbers]) -> Frames:
    """Return factor · clip + (1 - factor) · other, clip by clip."""
    blended = torch.empty(frames.shape, device=frames.device)
    for out, clip, image, (factor,) in zip(blended, frames, other, factors, strict=True):
        torch.mul(clip, factor, out=out).add_(image, alpha=1 - factor)
    return blended.clamp_(0, 255).to(torch.uint8)


def _adjust_color(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    return _blend(frames, F.rgb_to_grayscale(frames), factors)


def _adjust_contrast(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    return _blend(frames, F.rgb_to_grayscale(frames).float().mean(dim=(-3, -2, -1), keepdim=True), factors)


def _adjust_brightness(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    bright = torch.empty(frames.shape, device=frames.device)
    for out, clip, (factor,) in zip(bright, frames, factors, strict=True):
        torch.mul(clip, factor, out=out)
    return bright.clamp_(0, 255).to(torch.uint8)


def _adjust_sharpness(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    """Blend with a blurred image, but for the border."""
    sharp = frames.flatten(0, 1).float()
    kernel = torch.full((frames.shape[2], 1, 3, 3), 1 / 13, device=frames.device)
    kernel[:, :, 1, 1].fill_(5 / 13)
    blurred = torch.nn.functional.conv2d(sharp, kernel, groups=frames.shape[2]).round_()
    inner = sharp[..., 1:-1, 1:-1]
    blurred.sub_(inner)
    for clip, change, (factor,) in zip(
        inner.unflatten(0, frames.shape[:2]), blurred.unflatten(0, frames.shape[:2]), factors, strict=True
    ):
        clip.add_(change, alpha=1 - factor)
    return sharp.clamp_(0, 255).to(torch.uint8).view(frames.shape)


def _per_clip(numbers: Float[Tensor, "N 1"]) -> Float[Tensor, "N 1 1 1 1"]:
    return numbers[:, :, None, None, None]


def _posterize(frames: Frames, _: list[Numbers], masks: Float[Tensor, "N 1"]) -> Frames:
    return frames & _per_clip(masks).to(torch.uint8)


def _solarize(frames: Frames, _: list[Numbers], thresholds: Float[Tensor, "N 1"]) -> Frames:
    return torch.where(frames.to(torch.int16) >= _per_clip(thresholds).to(torch.int16), 255 - frames, frames)


def _solarize_add(frames: Frames, _: list[Numbers], amounts: Float[Tensor, "N 1"]) -> Frames:
    lighter = (frames.to(torch.int16) + _per_clip(amounts).to(torch.int16)).clamp_(0, 255).to(torch.uint8)
    return torch.where(frames < 128, lighter, frames)


def _posterize_mask(strength: float, *_: int) -> Numbers:
    """Keep 4 to 1 bits."""
    return (256 - 2.0 ** (8 - max(1, 4 - int(4 * abs(strength)))),)


def _blend_factor(strength: float, *_: int) -> Numbers:
    return (max(0.1, 1 + 0.9 * strength),)


def _rotation(strength: float, *_: int) -> Numbers:
    angle = math.radians(30 * strength)
    return (math.cos(angle), math.sin(angle), 0, -math.sin(angle), math.cos(angle), 0)


OPERATIONS = {
    "autocontrast": Operation(lambda frames, *_: F.autocontrast(frames)),
    "equalize": Operation(lambda frames, *_: F.equalize(frames)),
    "invert": Operation(lambda frames, *_: F.invert(frames)),
    "rotate": Operation(_warp, _rotation),
    "posterize": Operation(_posterize, _posterize_mask),
    "solarize": Operation(_solarize, lambda s, height, width: (256 - int(256 * abs(s)),)),
    "solarize_add": Operation(_solarize_add, lambda s, height, width: (min(128, int(110 * abs(s))),)),
    "color": Operation(_adjust_color, _blend_factor),
    "contrast": Operation(_adjust_contrast, _blend_factor),
    "brightness": Operation(_adjust_brightness, _blend_factor),
    "sharpness": Operation(_adjust_sharpness, _blend_factor),
    "shear_x": Operation(_warp, lambda s, height, width: (1, 0.3 * s, 0, 0, 1, 0)),
    "shear_y": Operation(_warp, lambda s, height, width: (1, 0, 0, 0.3 * s, 1, 0)),
    "translate_x": Operation(_warp, lambda s, height, width: (1, 0, -0.45 * s * width, 0, 1, 0)),
    "translate_y": Operation(_warp, lambda s, height, width: (1, 0, 0, 0, 1, -0.45 * s * height)),
}

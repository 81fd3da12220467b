"""RandAugment and random erasing as the plan asks for them: on the clips' device, in uint8, alike in all their frames.

Equal operations are done to all clips at once. Their numbers come to the device in one copy from pinned memory, or with
the launch: a small table copied for a clip, as torchvision does, would wait until the GPU has done all that is queued.
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

GREY = 128.0  # what is shown where a shifted or turned frame has nothing
AT_ONCE = 8  # clips, of which an operation makes 37 MiB each in fp32 (16 frames of 224×224)

Frames = UInt8[Tensor, "N T C H W"]
Numbers = tuple[float, ...]


class Operation(NamedTuple):
    """What is done to several clips; operations with the same `apply` are done together."""

    apply: Callable[[Frames, list[Numbers], Float[Tensor, "N X"]], Frames]  # the numbers, here and on the device
    numbers: Callable[[float, int, int], Numbers] = lambda strength, height, width: ()


def _moved(frames: Frames, _: list[Numbers], matrices: Float[Tensor, "N 6"]) -> Frames:
    """Bilinear, between what lies around the place that `matrices`, by rows, give for every pixel, from the centre."""
    height, width = frames.shape[-2:]
    base = matrices.new_empty(height, width, 3)
    base[..., 0].copy_(torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=frames.device))
    base[..., 1].copy_(torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=frames.device)[:, None])
    base[..., 2].fill_(1)
    scaled = matrices.view(-1, 2, 3).transpose(1, 2).clone()  # grid_sample counts from -1 to 1
    for axis, side in enumerate((width, height)):
        scaled[..., axis].div_(scaled.new_full((), side / 2))  # by a number of the host's, a GPU would multiply
    grid = base.view(1, height * width, 3).expand(len(frames), -1, -1).bmm(scaled).view(-1, height, width, 2)
    pictures = frames.flatten(1, 2).float()
    inside = torch.ones_like(pictures[:, :1])
    found = torch.nn.functional.grid_sample(torch.cat((pictures, inside), 1), grid, align_corners=False)
    pictures, inside = found[:, :-1], found[:, -1:]
    return pictures.sub_(GREY).mul_(inside).add_(GREY).round_().to(torch.uint8).view(frames.shape)


def _blended(frames: Frames, other: Tensor, factors: list[Numbers]) -> Frames:
    """Each clip times its factor, plus the other picture times what is left."""
    blended = torch.empty(frames.shape, device=frames.device)
    for out, clip, picture, (factor,) in zip(blended, frames, other, factors, strict=True):
        torch.mul(clip, factor, out=out).add_(picture, alpha=1 - factor)
    return blended.clamp_(0, 255).to(torch.uint8)


def _colored(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    return _blended(frames, F.rgb_to_grayscale(frames), factors)


def _contrasted(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    return _blended(frames, F.rgb_to_grayscale(frames).float().mean(dim=(-3, -2, -1), keepdim=True), factors)


def _brightened(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    bright = torch.empty(frames.shape, device=frames.device)
    for out, clip, (factor,) in zip(bright, frames, factors, strict=True):
        torch.mul(clip, factor, out=out)
    return bright.clamp_(0, 255).to(torch.uint8)


def _sharpened(frames: Frames, factors: list[Numbers], _: Tensor) -> Frames:
    """What is left goes to a blurred picture, which has no border."""
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


def _posterized(frames: Frames, _: list[Numbers], masks: Float[Tensor, "N 1"]) -> Frames:
    return frames & _for_each(masks).to(torch.uint8)


def _solarized(frames: Frames, _: list[Numbers], thresholds: Float[Tensor, "N 1"]) -> Frames:
    return torch.where(frames.to(torch.int16) >= _for_each(thresholds).to(torch.int16), 255 - frames, frames)


def _solarized_below(frames: Frames, _: list[Numbers], amounts: Float[Tensor, "N 1"]) -> Frames:
    lighter = (frames.to(torch.int16) + _for_each(amounts).to(torch.int16)).clamp_(0, 255).to(torch.uint8)
    return torch.where(frames < 128, lighter, frames)


def _for_each(numbers: Float[Tensor, "N 1"]) -> Float[Tensor, "N 1 1 1 1"]:
    return numbers[:, :, None, None, None]


def _mask(strength: float, *_: int) -> Numbers:
    """The 4 to 1 bits that stay."""
    return (256 - 2.0 ** (8 - max(1, 4 - int(4 * abs(strength)))),)


def _factor(strength: float, *_: int) -> Numbers:
    return (max(0.1, 1 + 0.9 * strength),)


def _turn(strength: float, *_: int) -> Numbers:
    angle = math.radians(30 * strength)
    return (math.cos(angle), math.sin(angle), 0, -math.sin(angle), math.cos(angle), 0)


OPERATIONS = {
    "autocontrast": Operation(lambda frames, *_: F.autocontrast(frames)),
    "equalize": Operation(lambda frames, *_: F.equalize(frames)),
    "invert": Operation(lambda frames, *_: F.invert(frames)),
    "rotate": Operation(_moved, _turn),
    "posterize": Operation(_posterized, _mask),
    "solarize": Operation(_solarized, lambda s, height, width: (256 - int(256 * abs(s)),)),
    "solarize_add": Operation(_solarized_below, lambda s, height, width: (min(128, int(110 * abs(s))),)),
    "color": Operation(_colored, _factor),
    "contrast": Operation(_contrasted, _factor),
    "brightness": Operation(_brightened, _factor),
    "sharpness": Operation(_sharpened, _factor),
    "shear_x": Operation(_moved, lambda s, height, width: (1, 0.3 * s, 0, 0, 1, 0)),
    "shear_y": Operation(_moved, lambda s, height, width: (1, 0, 0, 0.3 * s, 1, 0)),
    "translate_x": Operation(_moved, lambda s, height, width: (1, 0, -0.45 * s * width, 0, 1, 0)),
    "translate_y": Operation(_moved, lambda s, height, width: (1, 0, 0, 0, 1, -0.45 * s * height)),
}


class Group(NamedTuple):
    """Clips to which the same is done next."""

    apply: Callable[..., Frames]
    clips: list[int]
    numbers: list[Numbers]


def augmented(
    clips: UInt8[Tensor, "B T H W C"],
    changes: Sequence[tuple[AugmentOp, ...]],
    boxes: Sequence[EraseBox | None],
    seeds: Sequence[int],
) -> UInt8[Tensor, "B T H W C"]:
    """Each clip with its `changes` made one after the other, and noise of ImageNet's colours in its box."""
    frames = list(clips.permute(0, 1, 4, 2, 3))
    groups = grouped(changes, *frames[0].shape[-2:])
    sizes = [sum(map(len, group.numbers)) for group in groups]
    every = [float(number) for group in groups for numbers in group.numbers for number in numbers]
    for group, numbers in zip(groups, to_device(every, clips.device).split(sizes), strict=True):
        together = torch.stack([frames[clip] for clip in group.clips])
        changed = group.apply(together, group.numbers, numbers.view(len(group.clips), -1))
        for clip, result in zip(group.clips, changed, strict=True):
            frames[clip] = result
    for clip, (box, seed) in enumerate(zip(boxes, seeds, strict=True)):
        if box is not None:
            frames[clip] = _erased(frames[clip], box, seed)
    return torch.stack([clip.permute(0, 2, 3, 1) for clip in frames])


def grouped(changes: Sequence[tuple[AugmentOp, ...]], height: int, width: int) -> list[Group]:
    """All operations, those that are alike together: first the first one of every clip, then the second one, ..."""
    groups: list[Group] = []
    for place in range(max(map(len, changes), default=0)):
        open_groups: dict[Callable[..., Frames], Group] = {}
        for clip, own in enumerate(changes):
            if place >= len(own):
                continue
            name, strength = own[place]
            operation = OPERATIONS[name]
            group = open_groups.get(operation.apply)
            if group is None or len(group.clips) == AT_ONCE:
                group = open_groups[operation.apply] = Group(operation.apply, [], [])
                groups.append(group)
            group.clips.append(clip)
            group.numbers.append(operation.numbers(strength, height, width))
    return groups


def _erased(frames: UInt8[Tensor, "T C H W"], box: EraseBox, seed: int) -> UInt8[Tensor, "T C H W"]:
    frames = frames.clone()
    side_y, side_x = frames.shape[-2:]
    top, left = int(box.top * side_y), int(box.left * side_x)
    erased = frames[:, :, top : top + max(1, int(box.height * side_y)), left : left + max(1, int(box.width * side_x))]
    generator = torch.Generator(frames.device).manual_seed(seed)
    noise = torch.randn(erased.shape, generator=generator, device=frames.device)
    erased.copy_((noise * 58 + 116).clamp(0, 255))
    return frames

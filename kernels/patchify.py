"""The tokenizer's input: patches of the uint8 clip, scaled and normalised as ImageNet's."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.launch import block_width, check, check_ids, runs_triton, wrap_triton

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_BLOCK = 512  # values of a patch that a program writes
TOKENS = 4  # patches a program writes


def patchify(
    clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """clip uint8 [B, 3, T, H, W] of any strides, ids int64 [B, K] or None for all -> (clip/255 - mean)/std, [B, K, P].

    A patch's values are in the order (p_t, p_h, p_w, c).
    """
    tokens = check_clip(clip, tubelet_size, patch_size)
    check(clip.shape[1] == 3, f"clips have {clip.shape[1]} channels: ImageNet's mean and deviation are those of RGB")
    if ids is not None:
        check_ids("ids", ids, clip, tokens)
    return (patchify_op if runs_triton(clip) else definition)(clip, ids, tubelet_size, patch_size, dtype)


def check_clip(clip: Tensor, tubelet_size: int, patch_size: int) -> int:
    """The number of tokens of a clip that whole patches cover."""
    check(clip.ndim == 5, f"the clip has shape {tuple(clip.shape)}: give [B, C, T, H, W]")
    check(clip.dtype == torch.uint8, f"the clip is {clip.dtype}: give uint8")
    _, _, frames, height, width = clip.shape
    check(
        frames % tubelet_size == 0 and height % patch_size == 0 and width % patch_size == 0,
        f"clips of {frames} x {height} x {width} are not made of whole patches of"
        f" {tubelet_size} x {patch_size} x {patch_size}",
    )
    return (frames // tubelet_size) * (height // patch_size) * (width // patch_size)


def definition(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype) -> Tensor:
    mean = torch.tensor(IMAGENET_MEAN, device=clip.device) * 255
    scale = 1 / (torch.tensor(IMAGENET_STD, device=clip.device) * 255)
    patches = gather_patches(clip, ids, tubelet_size, patch_size)
    return ((patches.float() - mean) * scale).flatten(2).to(dtype)


def gather_patches(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int) -> Tensor:
    """uint8 [B, K, p_t·p_h·p_w, C]: the patches named by `ids`, or all of them, in the order of tokens (t, h, w)."""
    batch, channels, _, height, width = clip.shape
    grid = (
        clip.unflatten(4, (-1, patch_size))
        .unflatten(3, (-1, patch_size))
        .unflatten(2, (-1, tubelet_size))
        .permute(0, 2, 4, 6, 3, 5, 7, 1)  # B, T/p_t, H/p_h, W/p_w, p_t, p_h, p_w, C; a view
    )
    if ids is None:
        return grid.reshape(batch, -1, tubelet_size * patch_size**2, channels)
    rows, columns = height // patch_size, width // patch_size
    row = torch.arange(batch, device=ids.device)[:, None]
    patches = grid[row, ids // (rows * columns), ids // columns % rows, ids % columns]
    return patches.reshape(*ids.shape, tubelet_size * patch_size**2, channels)


@triton.jit
def patch_corner(token, rows, columns, stride_t, stride_h, stride_w, TUBELET: tl.constexpr, PATCH: tl.constexpr):
    """Where in its clip a token's first pixel is, int64."""
    token = token.to(tl.int32)  # 64-bit divisions take a hundred instructions
    time = (token // (rows * columns)).to(tl.int64) * TUBELET
    line = (token // columns % rows).to(tl.int64) * PATCH
    return time * stride_t + line * stride_h + (token % columns).to(tl.int64) * (PATCH * stride_w)


@triton.jit
def line_offset(line, stride_t, stride_h, PATCH: tl.constexpr):
    """Where in its patch a line of pixels (p_t, p_h) starts."""
    return (line // PATCH) * stride_t + (line % PATCH) * stride_h


@triton.jit
def value_offset(
    value, stride_c, stride_t, stride_h, stride_w, PATCH: tl.constexpr, C: tl.constexpr, PIXELS_FIRST: tl.constexpr
):
    """Where in its patch the value at place (p_t, p_h, p_w, c) is; PIXELS_FIRST: a line's values are neighbours."""
    place = value % (PATCH * C)
    within = place if PIXELS_FIRST else (place // C) * stride_w + (place % C) * stride_c
    return line_offset(value // (PATCH * C), stride_t, stride_h, PATCH) + within


@triton.jit
def by_channel(channel, red: tl.constexpr, green: tl.constexpr, blue: tl.constexpr):
    return tl.where(channel == 0, red, tl.where(channel == 1, green, blue))


@triton.jit
def patchify_kernel(
    clip_ptr, ids_ptr, out_ptr, K, rows, columns, stride_b, stride_c, stride_t, stride_h, stride_w,
    VALUES: tl.constexpr, TUBELET: tl.constexpr, PATCH: tl.constexpr, PIXELS_FIRST: tl.constexpr,
    HAS_IDS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK neighbouring values of TOKENS patches: stores are whole lines, loads hit the cache."""
    programs = tl.cdiv(K, TOKENS)
    b = (tl.program_id(0) // programs).to(tl.int64)
    j = tl.program_id(0) % programs * TOKENS + tl.arange(0, TOKENS)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = j
    if HAS_IDS:
        token = tl.load(ids_ptr + b * K + j, mask=j < K, other=0)
    corner = b * stride_b + patch_corner(token, rows, columns, stride_t, stride_h, stride_w, TUBELET, PATCH)
    offset = value_offset(value, stride_c, stride_t, stride_h, stride_w, PATCH, 3, PIXELS_FIRST)
    inside = (j < K)[:, None] & (value < VALUES)[None, :]
    pixels = tl.load(clip_ptr + corner[:, None] + offset[None, :], mask=inside, other=0).to(tl.float32)
    channel = value % 3
    mean = by_channel(channel, 0.485 * 255, 0.456 * 255, 0.406 * 255)  # IMAGENET_MEAN, IMAGENET_STD
    scale = by_channel(channel, 1 / (0.229 * 255), 1 / (0.224 * 255), 1 / (0.225 * 255))
    out = ((pixels - mean[None, :]) * scale[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (b * K + j[:, None]) * VALUES + value[None, :], out, mask=inside)


def pixels_first(clip: Tensor) -> bool:
    """Whether a line's values lie (w, c) in memory, as in a permuted [B, T, H, W, C]: then a patch is read in order."""
    return clip.stride(1) == 1 and clip.stride(4) == clip.shape[1]


@torch.library.triton_op("adamae::patchify", mutates_args=())
def patchify_op(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype) -> Tensor:
    batch, channels, frames, height, width = clip.shape
    rows, columns = height // patch_size, width // patch_size
    count = frames // tubelet_size * rows * columns if ids is None else ids.shape[1]
    ids = None if ids is None else ids.contiguous()
    values = tubelet_size * patch_size**2 * channels
    block = block_width(values, MAX_BLOCK)
    out = clip.new_empty(batch, count, values, dtype=dtype)
    wrap_triton(patchify_kernel)[(batch * triton.cdiv(count, TOKENS), triton.cdiv(values, block))](
        clip, clip if ids is None else ids, out, count, rows, columns, *clip.stride(),
        VALUES=values, TUBELET=tubelet_size, PATCH=patch_size, PIXELS_FIRST=pixels_first(clip),
        HAS_IDS=ids is not None, TOKENS=TOKENS, BLOCK=block,
    )  # fmt: skip
    return out


def num_bytes(batch: int, count: int, values: int, itemsize: int) -> int:
    """What has to move: a byte in and `itemsize` bytes out for every value."""
    return batch * count * values * (1 + itemsize)


@register_flop_formula(torch.ops.adamae.patchify)
def _flops(clip_shape: Any, ids_shape: Any, tubelet_size: int, patch_size: int, *_args: Any, **_kwargs: Any) -> int:
    batch, channels, frames, height, width = clip_shape
    if ids_shape is None:
        return 2 * batch * channels * frames * height * width
    return 2 * ids_shape[0] * ids_shape[1] * tubelet_size * patch_size**2 * channels

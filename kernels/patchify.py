"""The tokenizer's input: patches of the uint8 clip, scaled and normalized as ImageNet's.

The Triton kernels here and in masked_patch_loss are for RGB: other numbers of channels take the reference.
"""

import torch
import triton
import triton.language as tl
from einops import rearrange
from torch import Tensor

from adamae.kernels.launch import check, check_ids, check_shape, runs_triton, triton_op, wrap_triton

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def patchify(
    clip: Tensor,
    ids: Tensor | None,
    tubelet_size: int,
    patch_size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """clip uint8 [B, T, H, W, C], ids int64 [B, K] or None for all -> (clip/255 - mean)/std, [B, K, P].

    A patch's values are in the order (p_t, p_h, p_w, c). Mean and deviation of each channel are ImageNet's for RGB; for
    all others, the means of those.
    """
    check_clip(clip, tubelet_size, patch_size)
    if ids is not None:
        check_ids("ids", ids, clip)
    patches = patchify_op if runs_triton(clip) and clip.shape[4] == 3 else patchify_ref
    return patches(clip, ids, tubelet_size, patch_size, dtype)


def check_clip(clip: Tensor, tubelet_size: int, patch_size: int) -> None:
    """Raise InputError unless whole patches cover the clip."""
    check_shape("the clip", clip, *"BTHWC")
    check(clip.dtype == torch.uint8, f"the clip is {clip.dtype}: give uint8")
    sides, patch = tuple(clip.shape[1:4]), (tubelet_size, patch_size, patch_size)
    is_whole = all(side % part == 0 for side, part in zip(sides, patch, strict=True))
    check(is_whole, f"clips of {sides} pixels are not made of whole patches of {patch}")


def patchify_ref(
    clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype
) -> Tensor:
    patches = gather_patches(clip, ids, tubelet_size, patch_size).float()
    mean, std = (  # other than RGB also on a GPU, for which a tensor from the host would wait
        torch.tensor(values, device=clip.device) if clip.shape[4] == 3 else sum(values) / 3
        for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return ((patches - 255 * mean) / (255 * std)).flatten(2).to(dtype)


def gather_patches(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int) -> Tensor:
    """Cut uint8 patches [B, K, p_t·p_h·p_w, C] at `ids`, or all of them, in (t, h, w) order."""
    patches = rearrange(
        clip,
        "b (t pt) (h ph) (w pw) c -> b (t h w) (pt ph pw) c",
        pt=tubelet_size,
        ph=patch_size,
        pw=patch_size,
    )
    return (
        patches if ids is None else patches[torch.arange(len(ids), device=ids.device)[:, None], ids]
    )


@triton.jit
def patch_tile(
    token,
    rows,
    columns,
    TUBELET: tl.constexpr,
    PATCH: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A token's patch as lines (p_t, p_h) of 3 · PATCH neighboring values, of which a tile [LINES, WIDTH] is a third:
    where each line starts in the clip and in the patch, the columns of the tile, and what of it is in the patch."""
    line = tl.arange(0, LINES)
    i = tl.arange(0, WIDTH)
    token = token.to(tl.int32)  # 64-bit divisions take a hundred instructions
    time = token // (rows * columns) * TUBELET + line // PATCH
    height = token // columns % rows * PATCH + line % PATCH
    in_clip = ((time * (rows * PATCH) + height).to(tl.int64) * columns + token % columns) * (
        PATCH * 3
    )
    inside = (line < TUBELET * PATCH)[:, None] & (i < PATCH)[None, :]
    return in_clip[:, None], line[:, None] * (PATCH * 3), i, inside


@triton.jit
def by_channel(place, red, green, blue):
    return tl.where(place % 3 == 0, red, tl.where(place % 3 == 1, green, blue))


@triton.jit
def patchify_kernel(
    clip_ptr,
    ids_ptr,
    out_ptr,
    K,
    rows,
    columns,
    stride_b,
    TUBELET: tl.constexpr,
    PATCH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program, of one warp, per patch. Its lines of 3 · PATCH values are read in three parts, so that a thread's 16
    neighbors fill one load and their channels are known when the kernel is compiled."""
    k = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + k) if HAS_IDS else k % K
    in_clip, in_patch, i, inside = patch_tile(token, rows, columns, TUBELET, PATCH, LINES, WIDTH)
    clip_ptrs = clip_ptr + (k // K) * stride_b + in_clip
    out_ptrs = out_ptr + k * (TUBELET * PATCH * PATCH * 3) + in_patch
    for part in tl.static_range(3):
        place = part * PATCH + i
        pixels = tl.load(clip_ptrs + place[None, :], mask=inside, other=0).to(tl.float32)
        mean = by_channel(
            place, 0.485 * 255, 0.456 * 255, 0.406 * 255
        )  # IMAGENET_MEAN, IMAGENET_STD
        scale = by_channel(place, 1 / (0.229 * 255), 1 / (0.224 * 255), 1 / (0.225 * 255))
        out = (pixels - mean[None, :]) * scale[None, :]
        tl.store(out_ptrs + place[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("patchify")
def patchify_op(
    clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype
) -> Tensor:
    batch, frames, height, width, _ = clip.shape
    rows, columns = height // patch_size, width // patch_size
    count = frames // tubelet_size * rows * columns if ids is None else ids.shape[1]
    out = clip.new_empty(batch, count, tubelet_size * patch_size**2 * 3, dtype=dtype)
    wrap_triton(patchify_kernel)[(batch * count,)](
        clip.contiguous(),
        clip if ids is None else ids.contiguous(),
        out,
        count,
        rows,
        columns,
        clip[0].numel(),
        TUBELET=tubelet_size,
        PATCH=patch_size,
        HAS_IDS=ids is not None,
        LINES=triton.next_power_of_2(tubelet_size * patch_size),
        WIDTH=triton.next_power_of_2(patch_size),
        num_warps=1,
    )
    return out

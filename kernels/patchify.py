"""The tokenizer's input: patches of the uint8 clip, scaled and normalized as ImageNet's.

The Triton kernels here and in masked_patch_loss are for RGB: other numbers of channels take the
reference.
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
    """Cut a clip into patches, normalized: (pixel / 255 - mean) / std.

    Mean and deviation of each channel are ImageNet's for RGB; for all others, the means of those.

    Args:
        clip: uint8 [B, T, H, W, C].
        ids: of the patches to cut, int64 [B, K] in the order (t, h, w); None for all N.
        tubelet_size: frames of a patch.
        patch_size: height and width of a patch in pixels.
        dtype: of the result.

    Returns:
        [B, K, P], with the P values of a patch in the order (p_t, p_h, p_w, c).

    Raises:
        InputError: if the clip is not uint8 or not made of whole patches, or the ids do not fit.
    """
    check_clip(clip, tubelet_size, patch_size)
    if ids is not None:
        check_ids("ids", ids, clip)
    is_rgb = clip.shape[4] == 3
    cut = patchify_op if runs_triton(clip) and is_rgb else patchify_ref
    return cut(clip, ids, tubelet_size, patch_size, dtype)


def check_clip(clip: Tensor, tubelet_size: int, patch_size: int) -> None:
    """Raise InputError unless a clip is uint8 [B, T, H, W, C], and whole patches cover it."""
    check_shape("the clip", clip, "B", "T", "H", "W", "C")
    check(clip.dtype == torch.uint8, f"the clip is {clip.dtype}: give uint8")
    frames, height, width = clip.shape[1:4]
    is_whole = frames % tubelet_size == 0 and height % patch_size == 0 and width % patch_size == 0
    sides = f"clips of {(frames, height, width)} pixels"
    patch = (tubelet_size, patch_size, patch_size)
    check(is_whole, f"{sides} are not made of whole patches of {patch}")


def patchify_ref(
    clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype
) -> Tensor:
    """Compute what `patchify` returns, for any number of channels."""
    patches = gather_patches(clip, ids, tubelet_size, patch_size).float()
    mean: Tensor | float
    std: Tensor | float
    if clip.shape[4] == 3:
        mean = torch.tensor(IMAGENET_MEAN, device=clip.device)
        std = torch.tensor(IMAGENET_STD, device=clip.device)
    else:
        # Plain numbers: this runs on a GPU too, for which a tensor made on the host would wait.
        mean = sum(IMAGENET_MEAN) / 3
        std = sum(IMAGENET_STD) / 3
    return ((patches - 255 * mean) / (255 * std)).flatten(2).to(dtype)


def gather_patches(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int) -> Tensor:
    """Cut a clip into uint8 patches [B, K, p_t·p_h·p_w, C] at `ids`, or all in (t, h, w) order."""
    patches = rearrange(
        clip,
        "b (t pt) (h ph) (w pw) c -> b (t h w) (pt ph pw) c",
        pt=tubelet_size,
        ph=patch_size,
        pw=patch_size,
    )
    if ids is None:
        return patches
    clips = torch.arange(len(ids), device=ids.device)[:, None]
    return patches[clips, ids]


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
    """Find a token's patch in the clip.

    It consists of lines (p_t, p_h) of 3 * PATCH neighboring values, and a tile [LINES, WIDTH] is a
    third of them. A token of 2 frames x 16 x 16 pixels has 32 lines of 48 values, in three tiles of
    32 x 16. Both sides of a tile are rounded up to powers of two.

    Returns where each line starts in the clip [LINES, 1] and in the patch [LINES, 1], the columns
    of the tile [WIDTH], and which of its values are in the patch [LINES, WIDTH].
    """
    line = tl.arange(0, LINES)
    i = tl.arange(0, WIDTH)
    # Divisions of 64 bits take a hundred instructions.
    token = token.to(tl.int32)
    frame = token // (rows * columns) * TUBELET + line // PATCH
    row = token // columns % rows * PATCH + line % PATCH
    # Where the line starts: counted in patches, and then in values.
    patch_row = (frame * (rows * PATCH) + row).to(tl.int64) * columns + token % columns
    start_in_clip = patch_row * (PATCH * 3)
    inside = (line < TUBELET * PATCH)[:, None] & (i < PATCH)[None, :]
    return start_in_clip[:, None], line[:, None] * (PATCH * 3), i, inside


@triton.jit
def by_channel(position, red, green, blue):
    """Return the value of the channel at each position of a line: red, green, blue, red, …"""
    return tl.where(position % 3 == 0, red, tl.where(position % 3 == 1, green, blue))


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
    """Cut and normalize a patch, by one warp.

    Its lines of 3 * PATCH values are read in three parts, so that a thread's 16 neighbors fill one
    load and their channels are known when the kernel is compiled.
    """
    k = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + k) if HAS_IDS else k % K
    in_clip, in_patch, i, inside = patch_tile(token, rows, columns, TUBELET, PATCH, LINES, WIDTH)
    clip_ptrs = clip_ptr + (k // K) * stride_b + in_clip
    out_ptrs = out_ptr + k * (TUBELET * PATCH * PATCH * 3) + in_patch
    for part in tl.static_range(3):
        position = part * PATCH + i
        pixels = tl.load(clip_ptrs + position[None, :], mask=inside, other=0).to(tl.float32)
        # IMAGENET_MEAN and IMAGENET_STD of pixels from 0 to 255.
        mean = by_channel(position, 0.485 * 255, 0.456 * 255, 0.406 * 255)
        scale = by_channel(position, 1 / (0.229 * 255), 1 / (0.224 * 255), 1 / (0.225 * 255))
        out = (pixels - mean[None, :]) * scale[None, :]
        tl.store(out_ptrs + position[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("patchify")
def patchify_op(
    clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype
) -> Tensor:
    batch, frames, height, width, _ = clip.shape
    rows = height // patch_size
    columns = width // patch_size
    count = frames // tubelet_size * rows * columns if ids is None else ids.shape[1]
    out = clip.new_empty(batch, count, tubelet_size * patch_size**2 * 3, dtype=dtype)
    wrap_triton(patchify_kernel)[(batch * count,)](
        clip.contiguous(),
        # Without ids the kernel does not read them: any tensor will do.
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

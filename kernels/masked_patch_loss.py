"""The reconstruction loss of every masked token, against targets that are made from the uint8 clip where it is used."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.kernels.launch import check, check_ids, check_shape, runs_triton, triton_op, wrap_triton
from adamae.kernels.patchify import by_channel, check_clip, gather_patches, patch_tile

Kind = Literal["mse", "l1"]
EPSILON = 255e-6  # added to the standard deviation: 1e-6 for pixels in [0, 1], as in the authors' code; here up to 255


def masked_patch_loss(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: Kind = "mse",
    normalize: bool = True,
) -> Tensor:
    """pred [B, M, P], clip uint8 [B, T, H, W, C], masked_ids int64 [B, M] -> fp32 [B, M].

    The mean over a patch's P values of the squared ("mse") or absolute ("l1") difference to the patch, which is
    normalized by channel with its mean and unbiased standard deviation, or only scaled to [0, 1]. The kernel saves the
    arguments and two numbers per patch and channel for the backward pass, never the targets.
    """
    check_clip(clip, tubelet_size, patch_size)
    check_ids("masked_ids", masked_ids, clip)
    pixels = tubelet_size * patch_size**2
    check_shape("pred", pred, *masked_ids.shape, pixels * clip.shape[4])
    check(kind in ("mse", "l1"), f"kind is {kind!r}: give mse or l1")
    check(
        not normalize or pixels > 1,
        "a patch of one pixel has no standard deviation: give normalize=False",
    )
    if runs_triton(pred) and clip.shape[4] == 3:
        return masked_patch_loss_op(
            pred, clip, masked_ids, tubelet_size, patch_size, kind, normalize
        )[0]
    return masked_patch_loss_ref(pred, clip, masked_ids, tubelet_size, patch_size, kind, normalize)


def masked_patch_loss_ref(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: Kind,
    normalize: bool,
) -> Tensor:
    # Pixels stay in 0…255, whose sums are exact in fp32: the target of a flat patch is exactly 0.
    dtype = torch.promote_types(pred.dtype, torch.float32)
    target = gather_patches(clip, masked_ids, tubelet_size, patch_size).to(dtype)
    if normalize:
        target = (target - target.mean(dim=2, keepdim=True)) / (
            target.std(dim=2, keepdim=True) + EPSILON
        )
    else:
        target = target / 255
    residual = pred.to(dtype) - target.flatten(2)
    return (residual.square() if kind == "mse" else residual.abs()).mean(dim=2)


@triton.jit
def channel_statistics(clip_ptrs, inside, i, c, PIXELS: tl.constexpr, PATCH: tl.constexpr):
    """Mean and 1 / (deviation + EPSILON) of a patch's channel. Sums of integers are exact in any order: a flat patch
    has no deviation, and its target is 0."""
    total = tl.zeros((inside.shape[0],), tl.int32)
    squares = tl.zeros((inside.shape[0],), tl.int32)
    for part in tl.static_range(3):
        place = part * PATCH + i
        pixels = tl.load(clip_ptrs + place[None, :], mask=inside, other=0).to(tl.int32)
        pixels = tl.where((place % 3 == c)[None, :], pixels, 0)
        total += tl.sum(pixels, axis=1)
        squares += tl.sum(pixels * pixels, axis=1)
    total = tl.sum(total, axis=0).to(tl.int64)
    spread = (PIXELS * tl.sum(squares, axis=0).to(tl.int64) - total * total).to(tl.float32)
    return total.to(tl.float32) / PIXELS, 1 / (tl.sqrt(spread / (PIXELS * (PIXELS - 1.0))) + 255e-6)


@triton.jit
def loss_kernel(
    grad_ptr,
    pred_ptr,
    clip_ptr,
    ids_ptr,
    statistics_ptr,
    out_ptr,
    M,
    rows,
    columns,
    stride_b,
    grad_stride_b,
    grad_stride_m,
    TUBELET: tl.constexpr,
    PATCH: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    L1: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """One program, of one warp, per patch, read as in patchify. Forward: from its statistics to its loss, in `out`.
    Backward: the gradient of its prediction there; the forward pass's statistics save the reductions."""
    PIXELS: tl.constexpr = TUBELET * PATCH * PATCH
    m = tl.program_id(0).to(tl.int64)
    in_clip, in_patch, i, inside = patch_tile(
        tl.load(ids_ptr + m), rows, columns, TUBELET, PATCH, LINES, WIDTH
    )
    clip_ptrs = clip_ptr + (m // M) * stride_b + in_clip
    first = m * (PIXELS * 3) + in_patch
    statistics = statistics_ptr + m * 6
    red, green, blue = 0.0, 0.0, 0.0
    scale_red, scale_green, scale_blue = 1.0 / 255, 1.0 / 255, 1.0 / 255
    if NORMALIZE and BACKWARD:
        red, green, blue = tl.load(statistics), tl.load(statistics + 1), tl.load(statistics + 2)
        scale_red, scale_green, scale_blue = (
            tl.load(statistics + 3),
            tl.load(statistics + 4),
            tl.load(statistics + 5),
        )
    elif NORMALIZE:
        red, scale_red = channel_statistics(clip_ptrs, inside, i, 0, PIXELS, PATCH)
        green, scale_green = channel_statistics(clip_ptrs, inside, i, 1, PIXELS, PATCH)
        blue, scale_blue = channel_statistics(clip_ptrs, inside, i, 2, PIXELS, PATCH)
        six = tl.arange(0, 8)
        values = by_channel(six, red, green, blue)
        values = tl.where(six < 3, values, by_channel(six, scale_red, scale_green, scale_blue))
        tl.store(statistics + six, values, mask=six < 6)
    if BACKWARD:
        grad = tl.load(grad_ptr + (m // M) * grad_stride_b + (m % M) * grad_stride_m) / (PIXELS * 3)
    total = tl.zeros((LINES, WIDTH), tl.float32)
    for part in tl.static_range(3):
        place = part * PATCH + i
        target = tl.load(clip_ptrs + place[None, :], mask=inside, other=0).to(tl.float32)
        target -= by_channel(place, red, green, blue)[None, :]
        target *= by_channel(place, scale_red, scale_green, scale_blue)[None, :]
        residual = (
            tl.load(pred_ptr + first + place[None, :], mask=inside, other=0).to(tl.float32) - target
        )
        if BACKWARD:
            grad_pred = (
                (residual > 0).to(tl.float32) - (residual < 0).to(tl.float32)
                if L1
                else 2 * residual
            )
            tl.store(
                out_ptr + first + place[None, :],
                (grad_pred * grad).to(out_ptr.dtype.element_ty),
                mask=inside,
            )
        else:
            total += tl.where(inside, tl.abs(residual) if L1 else residual * residual, 0.0)
    if not BACKWARD:
        tl.store(out_ptr + m, tl.sum(tl.sum(total, axis=1), axis=0) / (PIXELS * 3))


def kernel_options(
    tubelet_size: int, patch_size: int, kind: str, normalize: bool
) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    return {
        "TUBELET": tubelet_size,
        "PATCH": patch_size,
        "L1": kind == "l1",
        "NORMALIZE": normalize,
        "num_warps": 1,
        "LINES": triton.next_power_of_2(tubelet_size * patch_size),
        "WIDTH": triton.next_power_of_2(patch_size),
    }


@triton_op("masked_patch_loss")
def masked_patch_loss_op(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: str,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """-> loss [B, M] and, where the target is normalized, each channel's mean, then 1 / deviation [B, M, 6]."""
    batch, count, _ = pred.shape
    loss = pred.new_empty(batch, count, dtype=torch.float32)
    statistics = pred.new_empty(batch, count if normalize else 0, 6, dtype=torch.float32)
    wrap_triton(loss_kernel)[(batch * count,)](
        loss,
        pred.contiguous(),
        clip.contiguous(),
        masked_ids.contiguous(),
        statistics,
        loss,
        count,
        clip.shape[2] // patch_size,
        clip.shape[3] // patch_size,
        clip[0].numel(),
        *loss.stride(),
        **kernel_options(tubelet_size, patch_size, kind, normalize),
        BACKWARD=False,
    )
    return loss, statistics


@triton_op("masked_patch_loss_backward")
def masked_patch_loss_backward_op(
    grad: Tensor,
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    statistics: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: str,
    normalize: bool,
) -> Tensor:
    batch, count, _ = pred.shape
    out = torch.empty_like(pred, memory_format=torch.contiguous_format)
    wrap_triton(loss_kernel)[(batch * count,)](
        grad,
        pred.contiguous(),
        clip.contiguous(),
        masked_ids.contiguous(),
        statistics,
        out,
        count,
        clip.shape[2] // patch_size,
        clip.shape[3] // patch_size,
        clip[0].numel(),
        *grad.stride(),
        **kernel_options(tubelet_size, patch_size, kind, normalize),
        BACKWARD=True,
    )
    return out


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # zeros for the statistics
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.options = inputs[3:]


def _backward(ctx: Any, grad: Tensor, _statistics: Any) -> tuple:
    return (
        masked_patch_loss_backward_op(grad, *ctx.saved_tensors, *ctx.options),
        None,
        None,
        None,
        None,
        None,
        None,
    )


masked_patch_loss_op.register_autograd(_backward, setup_context=_setup)

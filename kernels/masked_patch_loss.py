"""The reconstruction loss of every masked token.

Its targets are made from the uint8 clip where they are compared, and never stored.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.kernels.launch import check, check_ids, check_shape, runs_triton, triton_op, wrap_triton
from adamae.kernels.patchify import by_channel, check_clip, gather_patches, patch_tile

Kind = Literal["mse", "l1"]
# Added to a standard deviation: the authors' 1e-6 is for pixels in [0, 1], here they are up to 255.
EPSILON = 255e-6


def masked_patch_loss(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: Kind = "mse",
    normalize: bool = True,
) -> Tensor:
    """Compare predicted patches with those of the clip.

    The kernel saves its arguments and two numbers a patch and channel for the backward pass.

    Args:
        pred: predicted patches [B, M, P], with the P values of a patch in patchify's order.
        clip: uint8 [B, T, H, W, C].
        masked_ids: of the predicted patches, int64 [B, M].
        tubelet_size: frames of a patch.
        patch_size: height and width of a patch in pixels.
        kind: squared ("mse") or absolute ("l1") difference.
        normalize: whether a target is normalized by its own mean and unbiased standard deviation in
            each channel; otherwise it is scaled to [0, 1].

    Returns:
        The mean difference over the P values of each patch, fp32 [B, M], or fp64 for predictions of
        fp64 on a CPU.

    Raises:
        InputError: if shapes, types or devices do not fit, or a single pixel is to be normalized.
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
    arguments = (pred, clip, masked_ids, tubelet_size, patch_size, kind, normalize)
    is_rgb = clip.shape[4] == 3
    if not runs_triton(pred) or not is_rgb:
        return masked_patch_loss_ref(*arguments)
    loss, _ = masked_patch_loss_op(*arguments)
    return loss


def masked_patch_loss_ref(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: Kind,
    normalize: bool,
) -> Tensor:
    """Compute what `masked_patch_loss` returns, for any number of channels."""
    # Pixels stay in 0…255, whose sums are exact in fp32: the target of a flat patch is exactly 0.
    dtype = torch.promote_types(pred.dtype, torch.float32)
    target = gather_patches(clip, masked_ids, tubelet_size, patch_size).to(dtype)
    if normalize:
        mean = target.mean(dim=2, keepdim=True)
        deviation = target.std(dim=2, keepdim=True) + EPSILON
        target = (target - mean) / deviation
    else:
        target = target / 255
    residual = pred.to(dtype) - target.flatten(2)
    errors = residual.square() if kind == "mse" else residual.abs()
    return errors.mean(dim=2)


@triton.jit
def channel_statistics(clip_ptrs, inside, i, c, PIXELS: tl.constexpr, PATCH: tl.constexpr):
    """Return mean and 1 / (deviation + EPSILON) of channel c of a patch.

    Sums of integers are exact in any order: a flat patch has no deviation, and its target is 0.
    """
    total = tl.zeros((inside.shape[0],), tl.int32)
    squares = tl.zeros((inside.shape[0],), tl.int32)
    for part in tl.static_range(3):
        position = part * PATCH + i
        pixels = tl.load(clip_ptrs + position[None, :], mask=inside, other=0).to(tl.int32)
        is_of_channel = position % 3 == c
        pixels = tl.where(is_of_channel[None, :], pixels, 0)
        total += tl.sum(pixels, axis=1)
        squares += tl.sum(pixels * pixels, axis=1)
    total = tl.sum(total, axis=0).to(tl.int64)
    squares = tl.sum(squares, axis=0).to(tl.int64)
    # The variance is (n * sum of squares - square of the sum) / (n * (n - 1)), for n = PIXELS.
    spread = (PIXELS * squares - total * total).to(tl.float32)
    mean = total.to(tl.float32) / PIXELS
    deviation = tl.sqrt(spread / (PIXELS * (PIXELS - 1.0)))
    # EPSILON, as kernels read no globals.
    return mean, 1 / (deviation + 255e-6)


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
    """Compare a patch, by one warp that reads it as patchify does.

    Forward: computes its statistics, and writes its loss to `out`. Backward: writes the gradient of
    its prediction there, with the forward pass's statistics, which saves the reductions.
    """
    PIXELS: tl.constexpr = TUBELET * PATCH * PATCH
    m = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + m)
    in_clip, in_patch, i, inside = patch_tile(token, rows, columns, TUBELET, PATCH, LINES, WIDTH)
    clip_ptrs = clip_ptr + (m // M) * stride_b + in_clip
    first = m * (PIXELS * 3) + in_patch
    statistics = statistics_ptr + m * 6
    red, green, blue = 0.0, 0.0, 0.0
    scale_red, scale_green, scale_blue = 1.0 / 255, 1.0 / 255, 1.0 / 255
    if NORMALIZE and BACKWARD:
        red = tl.load(statistics)
        green = tl.load(statistics + 1)
        blue = tl.load(statistics + 2)
        scale_red = tl.load(statistics + 3)
        scale_green = tl.load(statistics + 4)
        scale_blue = tl.load(statistics + 5)
    elif NORMALIZE:
        red, scale_red = channel_statistics(clip_ptrs, inside, i, 0, PIXELS, PATCH)
        green, scale_green = channel_statistics(clip_ptrs, inside, i, 1, PIXELS, PATCH)
        blue, scale_blue = channel_statistics(clip_ptrs, inside, i, 2, PIXELS, PATCH)
        # One store writes all six; the sides of a tile are powers of two.
        six = tl.arange(0, 8)
        values = by_channel(six, red, green, blue)
        values = tl.where(six < 3, values, by_channel(six, scale_red, scale_green, scale_blue))
        tl.store(statistics + six, values, mask=six < 6)
    if BACKWARD:
        grad = tl.load(grad_ptr + (m // M) * grad_stride_b + (m % M) * grad_stride_m) / (PIXELS * 3)
    total = tl.zeros((LINES, WIDTH), tl.float32)
    for part in tl.static_range(3):
        position = part * PATCH + i
        target = tl.load(clip_ptrs + position[None, :], mask=inside, other=0).to(tl.float32)
        target -= by_channel(position, red, green, blue)[None, :]
        target *= by_channel(position, scale_red, scale_green, scale_blue)[None, :]
        pred_ptrs = pred_ptr + first + position[None, :]
        residual = tl.load(pred_ptrs, mask=inside, other=0).to(tl.float32) - target
        if BACKWARD:
            if L1:
                # The sign, and 0 where the prediction is exact.
                slope = (residual > 0).to(tl.float32) - (residual < 0).to(tl.float32)
            else:
                slope = 2 * residual
            out_ptrs = out_ptr + first + position[None, :]
            tl.store(out_ptrs, (slope * grad).to(out_ptr.dtype.element_ty), mask=inside)
        else:
            error = tl.abs(residual) if L1 else residual * residual
            total += tl.where(inside, error, 0.0)
    if not BACKWARD:
        tl.store(out_ptr + m, tl.sum(tl.sum(total, axis=1), axis=0) / (PIXELS * 3))


def kernel_options(
    tubelet_size: int, patch_size: int, kind: str, normalize: bool
) -> dict[str, Any]:
    """Return the kernel's compile-time arguments, besides its direction."""
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
    """Return the loss [B, M] and the statistics of each patch [B, M, 6], empty unless normalized.

    These are the means of red, green and blue, then 1 / deviation of each.
    """
    batch, count, _ = pred.shape
    loss = pred.new_empty(batch, count, dtype=torch.float32)
    statistics = pred.new_empty(batch, count if normalize else 0, 6, dtype=torch.float32)
    wrap_triton(loss_kernel)[(batch * count,)](
        # Stands for the gradient, which the forward pass does not read.
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
    """Return the gradient of the predictions, [B, M, P], from that of the loss, [B, M]."""
    batch, count, _ = pred.shape
    out = pred.new_empty(pred.shape)
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
    pred, clip, masked_ids, *options = inputs
    _, statistics = output
    # Otherwise zeros would be filled in as gradients of the statistics.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(pred, clip, masked_ids, statistics)
    ctx.options = options


def _backward(ctx: Any, grad: Tensor, _statistics: Any) -> tuple:
    grad_pred = masked_patch_loss_backward_op(grad, *ctx.saved_tensors, *ctx.options)
    return grad_pred, None, None, None, None, None, None


masked_patch_loss_op.register_autograd(_backward, setup_context=_setup)

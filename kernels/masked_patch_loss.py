"""The reconstruction loss of every masked token, against targets that are made from the uint8 clip where it is used."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.launch import block_width, check, check_ids, runs_triton, wrap_triton
from kernels.patchify import (
    MAX_BLOCK,
    TOKENS,
    check_clip,
    gather_patches,
    line_offset,
    patch_corner,
    pixels_first,
    value_offset,
)

Kind = Literal["mse", "l1"]
EPSILON = 255e-6  # added to the standard deviation: 1e-6 for pixels in [0, 1], SPEC §4; ours go to 255


def masked_patch_loss(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: Kind = "mse",
    normalize: bool = True,
) -> Tensor:
    """pred [B, M, P], clip uint8 [B, C, T, H, W] of any strides, masked_ids int64 [B, M] -> fp32 [B, M].

    The mean over a patch's P values of the squared ("mse") or absolute ("l1") difference to the patch, which is
    normalised by channel with its mean and unbiased standard deviation, or only scaled to [0, 1]. Saved for the
    backward pass: the arguments, and on CUDA two numbers a patch and channel; targets never are.
    """
    tokens = check_clip(clip, tubelet_size, patch_size)
    check_ids("masked_ids", masked_ids, clip, tokens)
    pixels = tubelet_size * patch_size**2
    wanted = (*masked_ids.shape, pixels * clip.shape[1])
    check(pred.shape == wanted, f"pred has shape {tuple(pred.shape)}: these ids and patches need {wanted}")
    check(kind in ("mse", "l1"), f"kind is {kind!r}: give mse or l1")
    check(not normalize or pixels > 1, "a patch of one pixel has no standard deviation: give normalize=False")
    if runs_triton(pred):
        return masked_patch_loss_op(pred, clip, masked_ids, tubelet_size, patch_size, kind, normalize)[0]
    return Definition.apply(pred, clip, masked_ids, tubelet_size, patch_size, kind, normalize)


def difference(
    pred: Tensor, clip: Tensor, masked_ids: Tensor, tubelet_size: int, patch_size: int, normalize: bool
) -> Tensor:
    """target - pred in at least fp32, [B, M, p_t·p_h·p_w, C]."""
    # In pixels of 0…255, whose sums are exact in fp32: the target of a flat patch is exactly 0.
    dtype = torch.promote_types(pred.dtype, torch.float32)
    target = gather_patches(clip, masked_ids, tubelet_size, patch_size).to(dtype)
    if normalize:
        target -= target.mean(dim=2, keepdim=True)
        # Not Tensor.std: on the CPU its running mean takes 17 times as long as this two-pass form.
        deviation = torch.linalg.vector_norm(target, dim=2, keepdim=True) / (target.shape[2] - 1) ** 0.5
        target *= 1 / (deviation + EPSILON)
    else:
        target *= 1 / 255
    # In place, because the target lies in memory as the clip does: channel by channel or pixel by pixel.
    return target.sub_(pred.to(dtype).view(target.shape))


class Definition(torch.autograd.Function):
    """The definition. Its backward pass makes the targets anew instead of keeping something of their size."""

    @staticmethod
    def forward(
        pred: Tensor, clip: Tensor, masked_ids: Tensor, tubelet_size: int, patch_size: int, kind: Kind, normalize: bool
    ) -> Tensor:
        away = difference(pred, clip, masked_ids, tubelet_size, patch_size, normalize)
        return (away.square_() if kind == "mse" else away.abs_()).mean(dim=(2, 3))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.options = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        tubelet_size, patch_size, kind, normalize = ctx.options
        pred, clip, masked_ids = ctx.saved_tensors
        away = difference(pred, clip, masked_ids, tubelet_size, patch_size, normalize)
        slope = away.mul_(-2) if kind == "mse" else away.sign_().neg_()
        slope *= (grads[0] / pred.shape[-1])[..., None, None]
        return slope.flatten(2).to(pred.dtype), None, None, None, None, None, None


@triton.jit
def loss_kernel(
    pred_ptr, clip_ptr, ids_ptr, loss_ptr, statistics_ptr, total, M, rows, columns,
    stride_b, stride_c, stride_t, stride_h, stride_w,
    PIXELS: tl.constexpr, C: tl.constexpr, TUBELET: tl.constexpr, PATCH: tl.constexpr,
    L1: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS patches, channel by channel, each held in registers from its statistics to its loss."""
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pixel = tl.arange(0, BLOCK)
    inside = (m < total)[:, None] & (pixel < PIXELS)[None, :]
    token = tl.load(ids_ptr + m, mask=m < total, other=0)
    corner = (m // M).to(tl.int64) * stride_b
    corner += patch_corner(token, rows, columns, stride_t, stride_h, stride_w, TUBELET, PATCH)
    offset = line_offset(pixel // PATCH, stride_t, stride_h, PATCH) + (pixel % PATCH) * stride_w
    pred_ptrs = pred_ptr + m.to(tl.int64)[:, None] * (PIXELS * C) + pixel[None, :] * C
    loss = tl.zeros((TOKENS,), tl.float32)
    for c in tl.static_range(C):
        address = corner[:, None] + offset[None, :] + c * stride_c
        target = tl.load(clip_ptr + address, mask=inside, other=0).to(tl.float32)
        if NORMALIZE:
            mean = tl.sum(target, axis=1) / PIXELS
            target = tl.where(inside, target - mean[:, None], 0.0)
            scale = 1 / (tl.sqrt(tl.sum(target * target, axis=1) / (PIXELS - 1)) + 255e-6)  # EPSILON
            target *= scale[:, None]
            place = m.to(tl.int64) * (2 * C) + c
            tl.store(statistics_ptr + place, mean, mask=m < total)
            tl.store(statistics_ptr + place + C, scale, mask=m < total)
        else:
            target *= 1.0 / 255
        away = tl.load(pred_ptrs + c, mask=inside, other=0).to(tl.float32) - target
        loss += tl.sum(tl.abs(away) if L1 else away * away, axis=1)
    tl.store(loss_ptr + m, loss / (PIXELS * C), mask=m < total)


@triton.jit
def loss_backward_kernel(
    grad_ptr, pred_ptr, clip_ptr, ids_ptr, statistics_ptr, out_ptr, total, M, rows, columns,
    stride_b, stride_c, stride_t, stride_h, stride_w,
    PIXELS: tl.constexpr, C: tl.constexpr, TUBELET: tl.constexpr, PATCH: tl.constexpr,
    L1: tl.constexpr, NORMALIZE: tl.constexpr, PIXELS_FIRST: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK neighbouring values of TOKENS patches; the forward pass's statistics save the reductions."""
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (m < total)[:, None] & (value < PIXELS * C)[None, :]
    token = tl.load(ids_ptr + m, mask=m < total, other=0)
    corner = (m // M).to(tl.int64) * stride_b
    corner += patch_corner(token, rows, columns, stride_t, stride_h, stride_w, TUBELET, PATCH)
    offset = value_offset(value, stride_c, stride_t, stride_h, stride_w, PATCH, C, PIXELS_FIRST)
    target = tl.load(clip_ptr + corner[:, None] + offset[None, :], mask=inside, other=0).to(tl.float32)
    m = m.to(tl.int64)[:, None]
    if NORMALIZE:
        statistics_ptrs = statistics_ptr + m * (2 * C) + (value % C)[None, :]
        mean = tl.load(statistics_ptrs, mask=inside, other=0)
        target = (target - mean) * tl.load(statistics_ptrs + C, mask=inside, other=0)
    else:
        target *= 1.0 / 255
    away = tl.load(pred_ptr + m * (PIXELS * C) + value[None, :], mask=inside, other=0).to(tl.float32) - target
    slope = (away > 0).to(tl.float32) - (away < 0).to(tl.float32) if L1 else 2 * away
    out = slope * (tl.load(grad_ptr + m, mask=m < total, other=0).to(tl.float32) / (PIXELS * C))
    tl.store(out_ptr + m * (PIXELS * C) + value[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@torch.library.triton_op("adamae::masked_patch_loss", mutates_args=())
def masked_patch_loss_op(
    pred: Tensor, clip: Tensor, masked_ids: Tensor, tubelet_size: int, patch_size: int, kind: str, normalize: bool
) -> tuple[Tensor, Tensor]:
    """-> loss [B, M] and, where the target is normalised, each channel's mean and 1 / deviation [B, M, 2, C]."""
    (batch, count, _), channels = pred.shape, clip.shape[1]
    pixels = tubelet_size * patch_size**2
    loss = pred.new_empty(batch, count, dtype=torch.float32)
    statistics = pred.new_empty(batch, count if normalize else 0, 2, channels, dtype=torch.float32)
    wrap_triton(loss_kernel)[(triton.cdiv(batch * count, TOKENS),)](
        pred.contiguous(), clip, masked_ids.contiguous(), loss, statistics, batch * count, count,
        clip.shape[3] // patch_size, clip.shape[4] // patch_size, *clip.stride(),
        PIXELS=pixels, C=channels, TUBELET=tubelet_size, PATCH=patch_size,
        L1=kind == "l1", NORMALIZE=normalize, TOKENS=TOKENS, BLOCK=triton.next_power_of_2(pixels),
    )  # fmt: skip
    return loss, statistics


@torch.library.triton_op("adamae::masked_patch_loss_backward", mutates_args=())
def masked_patch_loss_backward_op(
    grad: Tensor, pred: Tensor, clip: Tensor, masked_ids: Tensor, statistics: Tensor,
    tubelet_size: int, patch_size: int, kind: str, normalize: bool,
) -> Tensor:  # fmt: skip
    (batch, count, values), channels = pred.shape, clip.shape[1]
    out = torch.empty_like(pred, memory_format=torch.contiguous_format)
    block = block_width(values, MAX_BLOCK)
    wrap_triton(loss_backward_kernel)[(triton.cdiv(batch * count, TOKENS), triton.cdiv(values, block))](
        grad.contiguous(), pred.contiguous(), clip, masked_ids.contiguous(), statistics, out, batch * count, count,
        clip.shape[3] // patch_size, clip.shape[4] // patch_size, *clip.stride(),
        PIXELS=values // channels, C=channels, TUBELET=tubelet_size, PATCH=patch_size,
        L1=kind == "l1", NORMALIZE=normalize, PIXELS_FIRST=pixels_first(clip), TOKENS=TOKENS, BLOCK=block,
    )  # fmt: skip
    return out


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.options = inputs[3:]


def _backward(ctx: Any, grad: Tensor, _statistics: Any) -> tuple:
    return masked_patch_loss_backward_op(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None, None


masked_patch_loss_op.register_autograd(_backward, setup_context=_setup)


def num_bytes(batch: int, count: int, values: int, itemsize: int) -> tuple[int, int]:
    """What forward and backward have to move: prediction and pixels in; those and the gradient out."""
    return batch * count * values * (itemsize + 1), batch * count * values * (2 * itemsize + 1)


@register_flop_formula(torch.ops.adamae.masked_patch_loss)
def _flops(pred_shape: Any, *_args: Any, **_kwargs: Any) -> int:
    return 8 * pred_shape[0] * pred_shape[1] * pred_shape[2]  # mean, variance, scaling, difference, square, sum


@register_flop_formula(torch.ops.adamae.masked_patch_loss_backward)
def _backward_flops(_grad_shape: Any, pred_shape: Any, *_args: Any, **_kwargs: Any) -> int:
    return 5 * pred_shape[0] * pred_shape[1] * pred_shape[2]

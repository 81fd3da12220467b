"""The decoder's input: visible features, then mask tokens, with positions, not un-shuffled."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.kernels.launch import (
    check,
    check_ids,
    check_shape,
    rows_contiguous,
    runs_triton,
    tiles,
    triton_op,
    wrap_triton,
)


def scatter_tokens(
    features: Tensor, mask_token: Tensor, table: Tensor, visible_ids: Tensor, masked_ids: Tensor
) -> Tensor:
    """Append a mask token for each masked id to the features, and add all positions.

    Row j < K is features[b, j] + table[visible_ids[b, j]]; row K + j is mask_token +
    table[masked_ids[b, j]]. Tokens stay in this order, since attention goes by their positions, and
    the decoder's last block can cut off the first K.

    Args:
        features: of the visible tokens, [B, K, E].
        mask_token: [E], for all masked tokens.
        table: positions [N, E]. They are fixed: they get no gradient.
        visible_ids: int64 [B, K].
        masked_ids: int64 [B, M].

    Returns:
        [B, K + M, E], in the features' dtype. The sum is computed in fp32 on a GPU.

    Raises:
        InputError: if shapes, types or devices do not fit, or the table requires a gradient.
    """
    check_shape("features", features, "B", "K", "E")
    check_ids("visible_ids", visible_ids, features)
    check_ids("masked_ids", masked_ids, features)
    check_shape("visible_ids", visible_ids, *features.shape[:2])
    check_shape("the mask token", mask_token, features.shape[2])
    check_shape("the table of positions", table, len(table), features.shape[2])
    check(
        not table.requires_grad,
        "the table of positions is fixed: give one that requires no gradient",
    )
    scatter = scatter_tokens_op if runs_triton(features) else scatter_tokens_ref
    return scatter(features, mask_token, table, visible_ids, masked_ids)


def scatter_tokens_ref(
    features: Tensor, mask_token: Tensor, table: Tensor, visible_ids: Tensor, masked_ids: Tensor
) -> Tensor:
    """Compute what `scatter_tokens` returns, with sums in the features' dtype."""
    table = table.to(features.dtype)
    masked = mask_token.to(features.dtype) + table[masked_ids]
    return torch.cat([features + table[visible_ids], masked], dim=1)


@triton.jit
def scatter_kernel(
    features_ptr,
    mask_token_ptr,
    table_ptr,
    visible_ptr,
    masked_ptr,
    out_ptr,
    stride_b,
    stride_k,
    K,
    M,
    E,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make a tile of ROWS tokens x BLOCK channels of a clip, visible or masked or both."""
    programs = tl.cdiv(K + M, ROWS)
    # Offsets in the output may exceed 2^31: 64-bit from here on.
    b = (tl.program_id(0) // programs).to(tl.int64)
    j = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    visible = j < K
    masked = (j >= K) & (j < K + M)
    # A row is in at most one of the lists, and what is not loaded is 0: their sum is the row's id.
    ids = tl.load(visible_ptr + b * K + j, mask=visible, other=0)
    ids += tl.load(masked_ptr + b * M + j - K, mask=masked, other=0)
    inside = (j < K + M)[:, None] & (d < E)
    is_feature = visible[:, None] & (d < E)
    feature_ptrs = features_ptr + b * stride_b + j[:, None] * stride_k + d
    feature = tl.load(feature_ptrs, mask=is_feature, other=0)
    token = tl.load(mask_token_ptr + d, mask=d < E, other=0)
    out = tl.where(visible[:, None], feature.to(tl.float32), token.to(tl.float32))
    table_ptrs = table_ptr + ids[:, None] * E + d
    out += tl.load(table_ptrs, mask=inside).to(tl.float32)
    out_ptrs = out_ptr + (b * (K + M) + j[:, None]) * E + d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("scatter_tokens")
def scatter_tokens_op(
    features: Tensor, mask_token: Tensor, table: Tensor, visible_ids: Tensor, masked_ids: Tensor
) -> Tensor:
    batch, num_visible, width = features.shape
    num_masked = masked_ids.shape[1]
    features = rows_contiguous(features)
    out = features.new_empty(batch, num_visible + num_masked, width)
    grid, sides = tiles(batch, num_visible + num_masked, width)
    wrap_triton(scatter_kernel)[grid](
        features,
        mask_token.contiguous(),
        table.contiguous(),
        visible_ids.contiguous(),
        masked_ids.contiguous(),
        out,
        features.stride(0),
        features.stride(1),
        num_visible,
        num_masked,
        width,
        **sides,
    )
    return out


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    features, mask_token = inputs[:2]
    ctx.num_visible = features.shape[1]
    ctx.dtype = mask_token.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple:
    # Views: the features' gradient is not moved.
    features, masked = grad.tensor_split([ctx.num_visible], dim=1)
    # All masked tokens of the batch share a mask token: so many terms are added up in fp32.
    mask_token = masked.sum(dim=(0, 1), dtype=torch.float32).to(ctx.dtype)
    return features, mask_token, None, None, None


scatter_tokens_op.register_autograd(_backward, setup_context=_setup)

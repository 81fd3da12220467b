"""The decoder's input: visible features, then mask tokens, each with its position, not un-shuffled."""

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
    """features [B, K, E], mask_token [E], table [N, E], ids int64 [B, K] and [B, M] -> [B, K + M, E].

    Row j is features[b, j] + table[visible_ids[b, j]] for j < K, then mask_token + table[masked_ids[b, j - K]], in
    features' dtype. The table is fixed: it gets no gradient.
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
    programs = tl.cdiv(K + M, ROWS)
    b = (tl.program_id(0) // programs).to(tl.int64)
    j = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    visible = j < K
    masked = (j >= K) & (j < K + M)
    ids = tl.load(visible_ptr + b * K + j, mask=visible, other=0)
    ids += tl.load(masked_ptr + b * M + j - K, mask=masked, other=0)
    inside = (j < K + M)[:, None] & (d < E)
    feature = tl.load(
        features_ptr + b * stride_b + j[:, None] * stride_k + d,
        mask=visible[:, None] & (d < E),
        other=0,
    )
    token = tl.load(mask_token_ptr + d, mask=d < E, other=0)
    row = tl.where(visible[:, None], feature.to(tl.float32), token.to(tl.float32))
    row += tl.load(table_ptr + ids[:, None] * E + d, mask=inside).to(tl.float32)
    tl.store(
        out_ptr + (b * (K + M) + j[:, None]) * E + d, row.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton_op("scatter_tokens")
def scatter_tokens_op(
    features: Tensor, mask_token: Tensor, table: Tensor, visible_ids: Tensor, masked_ids: Tensor
) -> Tensor:
    (batch, count, width), masked = features.shape, masked_ids.shape[1]
    features = rows_contiguous(features)
    out = features.new_empty(batch, count + masked, width)
    grid, sides = tiles(batch, count + masked, width)
    wrap_triton(scatter_kernel)[grid](
        features,
        mask_token.contiguous(),
        table.contiguous(),
        visible_ids.contiguous(),
        masked_ids.contiguous(),
        out,
        features.stride(0),
        features.stride(1),
        count,
        masked,
        width,
        **sides,
    )
    return out


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.num_visible, ctx.dtype = inputs[0].shape[1], inputs[1].dtype


def _backward(ctx: Any, grad: Tensor) -> tuple:
    features, masked = grad.tensor_split([ctx.num_visible], dim=1)  # views: nothing is moved
    return features, masked.sum(dim=(0, 1), dtype=torch.float32).to(ctx.dtype), None, None, None


scatter_tokens_op.register_autograd(_backward, setup_context=_setup)

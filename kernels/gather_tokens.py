"""The encoder's input: the visible rows of the tokens, with their positions added."""

from typing import Any

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


def gather_tokens(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """x [B, N, D], ids int64 [B, K], table [N, D] -> x[b, ids] + table[ids], [B, K, D] in x's dtype.

    The ids of a row ascend without repetition. The table is fixed: it gets no gradient.
    """
    check_shape("x", x, "B", "N", "D")
    check_ids("ids", ids, x)
    check_shape("the table of positions", table, *x.shape[1:])
    check(
        not table.requires_grad,
        "the table of positions is fixed here: add learnable positions before gathering",
    )
    return (gather_tokens_op if runs_triton(x) else gather_tokens_ref)(x, ids, table)


def gather_tokens_ref(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[2])) + table.to(x.dtype)[ids]


@triton.jit
def gather_kernel(
    x_ptr,
    ids_ptr,
    table_ptr,
    out_ptr,
    stride_b,
    stride_n,
    K,
    D,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    programs = tl.cdiv(K, ROWS)
    b = (tl.program_id(0) // programs).to(tl.int64)
    j = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (j < K)[:, None] & (d < D)
    ids = tl.load(ids_ptr + b * K + j, mask=j < K, other=0)[:, None]
    out = tl.load(x_ptr + b * stride_b + ids * stride_n + d, mask=inside).to(tl.float32)
    out += tl.load(table_ptr + ids * D + d, mask=inside).to(tl.float32)
    tl.store(out_ptr + (b * K + j[:, None]) * D + d, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("gather_tokens")
def gather_tokens_op(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    (batch, _, width), count = x.shape, ids.shape[1]
    x, ids = rows_contiguous(x), ids.contiguous()
    out = x.new_empty(batch, count, width)
    grid, sides = tiles(batch, count, width)
    wrap_triton(gather_kernel)[grid](
        x, ids, table.contiguous(), out, x.stride(0), x.stride(1), count, width, **sides
    )
    return out


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.tokens = inputs[0].shape[1]
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple:
    ids = ctx.saved_tensors[0][..., None].expand_as(grad)
    return grad.new_zeros(len(grad), ctx.tokens, grad.shape[2]).scatter_(1, ids, grad), None, None


gather_tokens_op.register_autograd(_backward, setup_context=_setup)

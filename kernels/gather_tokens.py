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
    """Gather tokens by id and add their positions: x[b, ids[b, j]] + table[ids[b, j]].

    Args:
        x: tokens [B, N, D].
        ids: int64 [B, K]; those of a row ascend without repetition, which is not checked.
        table: positions [N, D]. They are fixed: they get no gradient.

    Returns:
        [B, K, D], in x's dtype. The sum is computed in fp32 on a GPU.

    Raises:
        InputError: if shapes, types or devices do not fit, or the table requires a gradient.
    """
    check_shape("x", x, "B", "N", "D")
    check_ids("ids", ids, x)
    check_shape("the table of positions", table, *x.shape[1:])
    check(
        not table.requires_grad,
        "the table of positions is fixed here: add learnable positions before gathering",
    )
    gather = gather_tokens_op if runs_triton(x) else gather_tokens_ref
    return gather(x, ids, table)


def gather_tokens_ref(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Compute what `gather_tokens` returns, with the sum in x's dtype."""
    index = ids[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index) + table.to(x.dtype)[ids]


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
    """Gather a tile of ROWS tokens x BLOCK channels of a clip."""
    programs = tl.cdiv(K, ROWS)
    # Offsets in x may exceed 2^31: 64-bit from here on.
    b = (tl.program_id(0) // programs).to(tl.int64)
    j = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (j < K)[:, None] & (d < D)
    ids = tl.load(ids_ptr + b * K + j, mask=j < K, other=0)[:, None]
    x_ptrs = x_ptr + b * stride_b + ids * stride_n + d
    out = tl.load(x_ptrs, mask=inside).to(tl.float32)
    table_ptrs = table_ptr + ids * D + d
    out += tl.load(table_ptrs, mask=inside).to(tl.float32)
    out_ptrs = out_ptr + (b * K + j[:, None]) * D + d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("gather_tokens")
def gather_tokens_op(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    batch, _, width = x.shape
    count = ids.shape[1]
    x = rows_contiguous(x)
    out = x.new_empty(batch, count, width)
    grid, sides = tiles(batch, count, width)
    wrap_triton(gather_kernel)[grid](
        x,
        ids.contiguous(),
        table.contiguous(),
        out,
        x.stride(0),
        x.stride(1),
        count,
        width,
        **sides,
    )
    return out


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ids, _ = inputs
    ctx.num_tokens = x.shape[1]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    (ids,) = ctx.saved_tensors
    batch, _, width = grad.shape
    # Ids of a row do not repeat: nothing has to be added up, which would take atomics.
    grad_x = grad.new_zeros(batch, ctx.num_tokens, width)
    grad_x.scatter_(1, ids[..., None].expand_as(grad), grad)
    return grad_x, None, None


gather_tokens_op.register_autograd(_backward, setup_context=_setup)

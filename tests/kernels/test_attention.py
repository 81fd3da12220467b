"""Attention on a CPU in bf16, where the backward pass is ours: against exact softmax attention and PyTorch's own."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention


def inputs(rows: int, tokens: int) -> list[Tensor]:
    """q [2, 3, rows, 16], k and v [2, 3, tokens, 16], in double precision, but of bf16's values."""
    torch.manual_seed(0)
    shapes = [(2, 3, rows, 16), (2, 3, tokens, 16), (2, 3, tokens, 16), (2, 3, rows, 16)]
    return [torch.randn(shape).bfloat16().double() for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(dim=-1) @ v


def step(function, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, grad.to(dtype))


@pytest.mark.parametrize(("rows", "tokens"), [(33, 33), (20, 33)])
@pytest.mark.parametrize("heads_at_once", [1, 2, 3])
def test_in_bf16_it_errs_at_most_twice_as_much_as_plain_attention(rows, tokens, heads_at_once, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["kernels.attention"], "SCORES_AT_ONCE", heads_at_once * rows * tokens)
    given = inputs(rows, tokens)
    exact, ours, low = (
        step(function, dtype, *given)
        for function, dtype in ((plain, torch.double), (attention, torch.bfloat16), (plain, torch.bfloat16))
    )
    for x, y, z in zip(ours, exact, low, strict=True):
        assert x.dtype == torch.bfloat16
        assert 0 < (z - y).norm() < 0.02 * y.norm()
        assert (x - y).norm() <= 2 * (z - y).norm()


def test_in_other_precisions_it_is_pytorchs() -> None:
    given = inputs(20, 33)
    ours, theirs = (step(function, torch.float32, *given) for function in (attention, F.scaled_dot_product_attention))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_gradients_of_heads_lie_side_by_side() -> None:
    q, k, v, grad = (x.bfloat16() for x in inputs(20, 33))
    for gradient in step(attention, torch.bfloat16, q, k, v, grad)[1:]:
        assert gradient.transpose(1, 2).is_contiguous()

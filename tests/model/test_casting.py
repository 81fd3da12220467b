"""Weights in the products' dtype: the numbers of autocast, in two launches instead of two for every weight."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from model.blocks import Block
from model.casting import cast


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (6,), (3, 6))]


def gradients(copies: list[Tensor | None], given: list[nn.Parameter]) -> list[Tensor]:
    weight, bias, last = copies
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = nn.functional.linear(nn.functional.linear(x, weight, bias), last).float().square().sum()
    return list(torch.autograd.grad(loss, given))


def test_copies_and_gradients_are_those_of_single_casts_and_take_one_launch_each_way() -> None:
    ours, theirs = weights(), weights()
    with Operators() as operators:
        copies = cast(ours, torch.bfloat16)
        assert operators.seen["_foreach_copy_"] == 1
        found = gradients(copies, ours)
    assert operators.seen["_foreach_copy_"] == 2
    assert operators.seen["_to_copy"] == 3, "x in bf16, the loss in fp32, and its gradient back"
    expected = gradients([weight.to(torch.bfloat16) for weight in theirs], theirs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_what_needs_no_cast_is_itself_and_nothing_stays_nothing() -> None:
    given = weights()
    assert all(one is other for one, other in zip(cast(given, torch.float32), given, strict=True))
    copies = cast([given[0], None, given[2]], torch.bfloat16)
    assert copies[1] is None
    assert torch.equal(copies[2], given[2].bfloat16())


def test_weights_that_are_frozen_or_not_read_get_no_gradient() -> None:
    given = weights()
    given[0].requires_grad_(False)
    copies = cast(given, torch.bfloat16)
    assert copies[1] is not None
    copies[1].float().sum().backward()
    assert given[0].grad is None
    assert given[2].grad is None
    assert torch.equal(given[1].grad, torch.ones(6))


def test_a_block_casts_its_weights_together() -> None:
    block, x = Block(16, 2), torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16), Operators() as operators:
        block(x)
    assert operators.seen["_foreach_copy_"] == 1
    assert operators.seen["cat"] == 1, "the bias of queries, keys and values"
    assert not any(name in operators.seen for name in ("zeros_like", "zeros"))

"""Positions, and what blocks do otherwise than PyTorch's layers.

They cast weights together, recompute GELU, and drop branches.
"""

import operator
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adamae.model.blocks import Block, Dropout, DropPath, Mlp, Noise
from adamae.model.casting import autocast_dtype, cast_together, keep_copies
from adamae.model.tokenizer import position_table


class Operators(TorchDispatchMode):
    """Counts the operators that run under it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def plain(mlp: Mlp) -> nn.Sequential:
    return nn.Sequential(mlp.fc1, nn.GELU(), mlp.fc2)


def gradients(function: Any, x: Tensor, mlp: Mlp, in_bf16: bool) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        output = function(x)
    return [output, *torch.autograd.grad(output.double().square().sum(), [x, *mlp.parameters()])]


def test_an_mlp_is_two_linears_with_gelu_and_keeps_the_hidden_layer_once() -> None:
    mlp = Mlp(16, 64)
    x = torch.randn(2, 33, 16, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        dtype = autocast_dtype(x, mlp.fc1.weight)
        return mlp(x.to(dtype), cast_together(mlp.weights(), dtype))

    torch.testing.assert_close(gradients(run, x, mlp, False), gradients(plain(mlp), x, mlp, False))
    exact = gradients(plain(mlp), x, mlp, False)
    rounded = gradients(plain(mlp), x, mlp, True)
    in_bf16 = gradients(run, x, mlp, True)
    for value, plain_value, exact_value in zip(in_bf16, rounded, exact, strict=True):
        assert (value - exact_value).norm() <= 2 * (plain_value - exact_value).norm()
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(x)
    # Weights have two dimensions.
    hidden = [value for value in kept if value.shape[-1] == 64 and value.ndim > 2]
    assert [tuple(value.shape) for value in hidden] == [(2, 33, 64)]


@pytest.mark.parametrize(
    "layer",
    [partial(Dropout(0.25, layer=1), noise=Noise(0, 5)), DropPath(0.25)],
    ids=["dropout", "drop path"],
)
def test_dropped_and_scaled_in_training_only(layer: Any) -> None:
    module = layer if isinstance(layer, DropPath) else layer.func
    x = torch.randn(4000, 5, 7, dtype=torch.double, requires_grad=True)
    y = layer(x)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], kept.double() / 0.75)
    assert abs(kept[:, 0, 0].double().mean() - 0.75) < 0.03
    is_of_whole_clips = bool((kept == kept[:, :1, :1]).all())
    assert is_of_whole_clips == isinstance(layer, DropPath)
    module.eval()
    assert layer(x) is x
    module.train()


def test_dropout_is_a_function_of_seed_position_and_layer() -> None:
    x = torch.ones(4, 5, 7)

    def drop(x: Tensor, seed: int, offset: int, layer: int) -> Tensor:
        return Dropout(0.5, layer)(x, Noise(seed, offset))

    y = drop(x, 3, 2**32 - 2, 1)
    parts = [drop(x[i : i + 1], 3, 2**32 - 2 + i, 1) for i in range(4)]
    assert torch.equal(torch.cat(parts), y)
    for changed in (drop(x, 4, 2**32 - 2, 1), drop(x, 3, 2, 1), drop(x, 3, 2**32 - 2, 2), y[[1]]):
        agreement = (changed == y).float().mean()
        assert 0.3 < agreement < 0.7


def test_weights_are_cast_by_one_launch_each_way() -> None:
    weights = [nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (6,), (3, 6))]
    x = torch.randn(5, 4).bfloat16()

    def grads(weight: Tensor, bias: Tensor, last: Tensor) -> list[Tensor]:
        hidden = nn.functional.linear(x, weight, bias)
        loss = nn.functional.linear(hidden, last).float().square().sum()
        return list(torch.autograd.grad(loss, weights))

    with Operators() as operators:
        cast_gradients = grads(*cast_together(weights, torch.bfloat16))
    assert operators.calls["_foreach_copy_"] == 2
    expected = grads(*(weight.to(torch.bfloat16) for weight in weights))
    assert all(map(torch.equal, cast_gradients, expected))
    in_their_own_dtype = cast_together(weights, torch.float32)
    assert all(map(operator.is_, in_their_own_dtype, weights))
    weights[0].requires_grad_(False)
    _, last = cast_together([weights[0], weights[2]], torch.bfloat16)
    last.float().sum().backward()
    assert weights[0].grad is None
    with torch.autocast("cpu", torch.bfloat16), Operators() as operators:
        Block(16, 2)(torch.randn(2, 5, 16))
    assert operators.calls["_foreach_copy_"] == 1


def test_kept_copies_are_used_without_a_cast_and_follow_the_weights() -> None:
    block = Block(16, 2)
    plain = Block(16, 2)
    x = torch.randn(2, 5, 16)

    def run(block: Block) -> tuple[list[Tensor], int]:
        """Return output and gradients, and how often weights were cast."""
        with torch.autocast("cpu", torch.bfloat16), Operators() as operators:
            out = block(x)
        gradients = torch.autograd.grad(out.square().sum(), list(block.parameters()))
        return [out, *gradients], operators.calls["_foreach_copy_"]

    refresh = keep_copies(block, torch.bfloat16)
    for step in range(2):
        plain.load_state_dict(block.state_dict())
        values, casts = run(block)
        expected, plain_casts = run(plain)
        assert (casts, plain_casts) == (0, 1)
        # In the second step, copies are those of the first one until they are refreshed.
        assert all(map(torch.equal, values, expected)) == (step == 0)
        refresh()
        values, _ = run(block)
        assert all(map(torch.equal, values, expected))
        with torch.no_grad():
            for weight in block.parameters():
                weight.mul_(1.5)


@pytest.mark.parametrize("width", [16, 96, 384])
def test_separable_positions_tell_axes_apart(width: int) -> None:
    table = position_table("separable-3d", (2, 3, 4), width).view(2, 3, 4, width)
    assert table.flatten(0, 2).unique(dim=0).shape == (24, width)
    longer = position_table("separable-3d", (16, 3, 4), width)
    # A token has the same position in longer clips.
    assert torch.equal(longer[:24], table.flatten(0, 2))
    for axis in range(3):
        # Along one axis only its own channels change, and these do not depend on the other two.
        step = table.diff(dim=axis)
        last_other = 1 if axis == 2 else 2
        first_slice = step.select(last_other, 0).unsqueeze(last_other)
        assert torch.equal(step, first_slice.expand_as(step))
        assert (step.flatten(0, 2).abs().amax(0) > 0).sum() <= width // 2

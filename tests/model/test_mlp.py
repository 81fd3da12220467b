import copy

import torch
from timm.layers import Mlp as TimmMlp
from torch import Tensor

from model.mlp import GeluLinear, Mlp


def pair(dropout: float = 0.0) -> tuple[Mlp, TimmMlp]:
    """Ours and timm's, with the same weights."""
    torch.manual_seed(0)
    ours, theirs = Mlp(16, 64, dropout), TimmMlp(16, 64, drop=(0.0, dropout))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def step(mlp: TimmMlp, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output and gradients, by autocast to `dtype`, in double precision where there is none."""
    torch.manual_seed(1)
    x = torch.randn(2, 33, 16, requires_grad=True)
    mlp = copy.deepcopy(mlp) if dtype else copy.deepcopy(mlp).double()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is torch.bfloat16):
        output = mlp(x if dtype else x.double())
    output.double().square().sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in mlp.parameters())]


def test_in_fp32_it_is_timms_within_rounding() -> None:
    ours, theirs = pair()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(step(ours, torch.float32), step(theirs, torch.float32))


def test_in_bf16_it_errs_no_more_than_twice_as_much_as_timms() -> None:
    ours, theirs = pair()
    for got, plain, exact in zip(step(ours, torch.bfloat16), step(theirs, torch.bfloat16), step(theirs), strict=True):
        assert got.dtype == plain.dtype
        assert 0 < (plain - exact).norm() < 0.05 * exact.norm()
        assert (got - exact).norm() <= 2 * (plain - exact).norm()


def test_gradients_are_those_of_finite_differences() -> None:
    inputs = [torch.randn(*shape, dtype=torch.double, requires_grad=True) for shape in ((2, 3, 8), (4, 8), (4,))]
    weight = inputs[1]
    assert torch.autograd.gradcheck(lambda *given: GeluLinear.apply(*given, weight.detach(), given[2]), inputs)


def test_dropout_drops_in_training_only() -> None:
    ours, theirs = pair(dropout=0.5)
    x = torch.randn(64, 16)
    assert not torch.equal(ours(x), ours(x))
    torch.testing.assert_close(torch.stack([ours(x) for _ in range(400)]).mean(0), theirs.eval()(x), atol=0.2, rtol=0)
    torch.testing.assert_close(ours.eval()(x), theirs(x))


def test_only_the_output_is_dropped() -> None:
    """As in the published code; timm would drop of the hidden layer too, and its outputs would be other numbers."""
    ours, theirs = pair(dropout=0.5)
    x = torch.randn(64, 16)
    dropped, whole = ours(x), 2 * theirs.eval()(x)
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, whole))


def test_the_hidden_layer_is_kept_once() -> None:
    kept: list[Tensor] = []
    ours, _ = pair()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ours(torch.randn(2, 33, 16))
    assert [tuple(x.shape) for x in kept if x.shape[-1] == 64 and x.ndim > 2] == [(2, 33, 64)]


def test_frozen_weights_get_no_gradient() -> None:
    ours, theirs = pair()
    for mlp in (ours, theirs):
        mlp.requires_grad_(False)
    x = torch.randn(3, 16, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(ours(x).sum(), x), torch.autograd.grad(theirs(x).sum(), x))

import pytest
import torch

from model.dropout import Drop, Dropout, draw_kept


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_are_dropped_with_the_probability_asked_for(p, device) -> None:
    torch.manual_seed(0)
    count = 10**6 + 3
    x = torch.ones(count, device=device, dtype=torch.bfloat16)
    kept = draw_kept(x, p)
    assert abs(1 - kept.float().mean().item() - p) < 5 * (p * (1 - p) / count) ** 0.5
    for shift in (1, 2, 3, 4):  # neighbours share their bits' draw, and must not share the bits
        both = (kept[:-shift] & kept[shift:]).float().mean().item()
        assert abs(both - (1 - p) ** 2) < 5 * (p * (1 - p) / count) ** 0.5
    assert not torch.equal(kept, draw_kept(x, p))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_kept_is_scaled_and_its_gradient_too(device) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, device=device, dtype=torch.double).requires_grad_()
    y = Drop.apply(x, 0.25)
    kept = y != 0
    assert kept.any()
    assert not kept.all()
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], kept.double() / 0.75)


def test_nothing_is_dropped_in_evaluation_or_with_probability_0() -> None:
    x = torch.randn(3, 4)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert not torch.equal(Dropout(0.5)(x), x)

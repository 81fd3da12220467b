"""Draws from softmax(γ · logits), a γ for each row."""

import pytest
import torch
from scipy import stats

from common.errors import InputError
from kernels import gumbel_topk

DRAWS = 4000


def test_a_sharpness_draws_from_the_sharper_distribution_and_leaves_log_probs_alone() -> None:
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).expand(DRAWS, -1)
    for gamma in (0.5, 3.0):
        visible, _, log_probs = gumbel_topk(logits, 1, 5, 0, torch.full((DRAWS,), gamma))
        expected = (gamma * logits[0]).double().softmax(0) * DRAWS
        pooled = expected > 5  # below, a chi-square test says nothing
        counts = torch.bincount(visible[:, 0], minlength=16).double()
        both = [torch.cat((x[pooled], x[~pooled].sum()[None])).numpy() for x in (counts, expected)]
        assert stats.chisquare(both[0][both[1] > 0], both[1][both[1] > 0]).pvalue > 1e-3
        assert torch.equal(log_probs, gumbel_topk(logits, 1, 5, 0)[2])


def test_a_sharpness_of_one_draws_as_none_does(device: str) -> None:
    logits = torch.randn(3, 40).to(device)
    ones = torch.ones(3, device=device)
    assert all(
        torch.equal(a, b) for a, b in zip(gumbel_topk(logits, 7, 1, 2), gumbel_topk(logits, 7, 1, 2, ones), strict=True)
    )


def test_every_row_has_a_sharpness_of_its_own_and_the_kernel_draws_as_the_definition(device: str, monkeypatch) -> None:
    logits = torch.randn(3, 200)
    sharpness = torch.tensor([0.3, 1.0, 7.0])
    got = gumbel_topk(logits.to(device), 20, 1, 2, sharpness.to(device))
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)
    expected = gumbel_topk(logits, 20, 1, 2, sharpness)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:2], expected[:2], strict=True))
    assert torch.equal(expected[0][1], gumbel_topk(logits, 20, 1, 2)[0][1])
    assert torch.equal(expected[0][2], gumbel_topk(7 * logits, 20, 1, 2)[0][2])


@pytest.mark.parametrize("bad", [torch.ones(2), torch.ones(3, dtype=torch.float64)])
def test_a_sharpness_of_another_shape_or_type_is_refused(bad) -> None:
    with pytest.raises(InputError, match="give fp32, one for each of the rows"):
        gumbel_topk(torch.zeros(3, 4), 1, 0, 0, bad)

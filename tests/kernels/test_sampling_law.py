"""gumbel_topk samples from softmax(logits), without replacement.

Its noise is checked bit by bit in test_noise.py.
"""

import itertools

import torch
from scipy import stats

from adamae.kernels.gumbel_topk import gumbel_topk

# A true sampler fails a test this often; seeds are fixed, so each either always or never does.
CHANCE = 1e-3


def test_subsets_come_as_often_as_enumeration_says() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -2.0]])
    probability = torch.softmax(logits[0].double(), dim=0).tolist()
    exact: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(6), 3):
        # Each token is sampled by its probability among those that remain.
        chance = 1.0
        remaining = 1.0
        for token in order:
            chance *= probability[token] / remaining
            remaining -= probability[token]
        subset = tuple(sorted(order))
        exact[subset] = exact.get(subset, 0) + chance
    assert abs(sum(exact.values()) - 1) < 1e-12
    num_rows = 50_000
    device = "cuda" if torch.cuda.is_available() else "cpu"
    visible, *_ = gumbel_topk(logits.to(device).expand(num_rows, -1), 3, seed=1, offset=0)
    subsets, counts = visible.unique(dim=0, return_counts=True)
    frequency = dict(zip(map(tuple, subsets.tolist()), counts.tolist(), strict=True))
    observed = [frequency.get(subset, 0) for subset in exact]
    expected = [num_rows * chance for chance in exact.values()]
    assert stats.chisquare(observed, expected).pvalue > CHANCE

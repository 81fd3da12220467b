"""gumbel_topk samples from softmax(logits), without replacement. (Its noise is checked bit by bit in test_noise.py.)"""

import itertools

import torch
from scipy import stats

from adamae.kernels.gumbel_topk import gumbel_topk

CHANCE = 1e-3  # a true sampler fails a test this often; seeds are fixed, so each either always or never does


def test_subsets_come_as_often_as_enumeration_says():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -2.0]])
    probability = torch.softmax(logits[0].double(), dim=0).tolist()
    exact: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(6), 3):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * probability[token] / left, left - probability[token]
        exact[tuple(sorted(order))] = exact.get(tuple(sorted(order)), 0) + chance
    assert abs(sum(exact.values()) - 1) < 1e-12
    rows, device = 50_000, "cuda" if torch.cuda.is_available() else "cpu"
    visible, *_ = gumbel_topk(logits.to(device).expand(rows, -1), 3, seed=1, offset=0)
    subsets, counts = visible.unique(dim=0, return_counts=True)
    seen = dict(zip(map(tuple, subsets.tolist()), counts.tolist(), strict=True))
    observed = [seen.get(subset, 0) for subset in exact]
    assert stats.chisquare(observed, [rows * chance for chance in exact.values()]).pvalue > CHANCE

"""gumbel_topk samples from softmax(logits), without replacement. (Its noise is checked bit by bit in test_noise.py.)"""

import itertools

import numpy as np
import torch
from scipy import stats

from kernels.gumbel_topk import gumbel_topk

CHANCE = 1e-3  # a true sampler fails a test this often; seeds are fixed, so each either always or never does


def sample(logits, k, rows, seed):
    """Visible ids of `rows` samples from one row of logits, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [
        gumbel_topk(logits.to(device).expand(min(1024, rows - first), -1), k, seed, first)[0].cpu()
        for first in range(0, rows, 1024)  # what a CPU's cache holds
    ]
    return torch.cat(parts)


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
    rows = 50_000
    subsets, counts = sample(logits, 3, rows, seed=1).unique(dim=0, return_counts=True)
    seen = dict(zip(map(tuple, subsets.tolist()), counts.tolist(), strict=True))
    observed = [seen.get(subset, 0) for subset in exact]
    assert stats.chisquare(observed, [rows * chance for chance in exact.values()]).pvalue > CHANCE


def test_inclusion_is_that_of_a_float64_reference_and_no_index_repeats():
    rows, tokens, k = 20_000, 512, 40
    logits = torch.randn(1, tokens, generator=torch.Generator().manual_seed(5)) * 2
    ids = sample(logits, k, rows, seed=2)
    assert bool((ids.diff(dim=1) > 0).all())
    counts = np.bincount(ids.flatten().numpy(), minlength=tokens)

    generator, weights = np.random.default_rng(6), np.exp(-logits[0].double().numpy())
    reference = np.zeros(tokens)
    for _ in range(0, rows, 500):
        # The k first of exponential arrivals are the k largest of log-probability + Gumbel noise.
        arrivals = generator.standard_exponential((500, tokens)) * weights
        reference += (arrivals <= np.partition(arrivals, k - 1, axis=1)[:, k - 1 : k]).sum(axis=0)

    share = (counts + reference) / (2 * rows)
    z = (counts - reference) / np.sqrt(2 * rows * share * (1 - share))
    assert stats.chi2.sf(np.square(z).sum(), tokens - 1) > CHANCE  # k a row costs one degree of freedom

"""Fit classifiers on frozen features: a linear one, and an attentive one of few parameters.

Their penalties are chosen by cross-validation within the training videos, where no group is in two
folds: a penalty that was chosen by held-out videos would make these look easier than they are.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from adamae.training.measures import Videos

# From nearly no penalty to one under which all videos look alike; the strongest comes first, which
# is taken where several are equally good.
RIDGE_PENALTIES = np.geomspace(1e5, 1, 11)
ATTENTIVE_PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
# The penalties where cross-validation cannot choose one, as there is a single group.
DEFAULT_RIDGE_PENALTY = 1e3
DEFAULT_ATTENTIVE_PENALTY = 1e-2
RIDGE_FOLDS = 5
# Fewer, as each takes the time of hundreds of passes over all tokens.
ATTENTIVE_FOLDS = 3
# Queries of the attentive classifier; each pools its own part of the channels.
MAX_QUERIES = 8
# Steps of L-BFGS per penalty, each of which begins at the weights of the stronger one.
MAX_STEPS = 40
# Numbers in all tokens for each thread of torch: with two threads for fewer, on two busy cores,
# fitting took three times the CPU time of one, as each waits for the other.
NUMBERS_PER_THREAD = 2**23
Fold = tuple[np.ndarray, np.ndarray]


class Fitted(NamedTuple):
    """What a classifier predicts for each query, and the penalty that was chosen."""

    predicted: Int[Tensor, " Q"]
    penalty: float


def split_folds(training: Videos, num_folds: int) -> list[Fold]:
    """Split videos for cross-validation: indices of training and validation videos of each fold.

    No group is divided, and classes are spread as evenly as groups allow. Return [] if there is a
    single group, or a fold would learn from videos of a single class.
    """
    # Imports of scikit-learn take a second, and train.py does without them.
    from sklearn.model_selection import StratifiedGroupKFold

    groups = training.groups.numpy()
    labels = training.labels.numpy()
    largest_class = np.bincount(labels).max()
    num_folds = min(num_folds, len(np.unique(groups)), largest_class)
    if num_folds < 2:
        return []
    # Shuffled with a fixed seed, so that the order of classes in a dataset has no effect.
    splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        # It warns of classes that have fewer videos than there are folds, which are fine here.
        warnings.simplefilter("ignore", UserWarning)
        folds = list(splitter.split(labels, labels, groups))
    for learned, _ in folds:
        if len(np.unique(labels[learned])) < 2:
            return []
    return folds


class RidgePath:
    """Ridge regression on ±1 for each class, for any penalty, of standardized features.

    It predicts what scikit-learn's RidgeClassifier does, far faster than its grid search: one
    decomposition serves all penalties (Hastie, Tibshirani, Friedman: The Elements of Statistical
    Learning, equation 3.47). It is that of the products of videos or of features, whichever are
    fewer, which takes a quarter of the time of the features' singular values.
    """

    def __init__(self, training: Videos, num_classes: int) -> None:
        # In double precision, since penalties are small beside the largest squared values.
        features = training.features.double()
        self._mean = features.mean(dim=0)
        std = features.std(dim=0, correction=0)
        # A feature that is the same in all videos has no deviation to divide by.
        self._std = std.where(std > 0, 1)
        target = 2 * F.one_hot(training.labels, num_classes).double() - 1
        self._bias = target.mean(dim=0)
        standardized = self._standardize(features)
        target = target - self._bias
        if len(standardized) < standardized.shape[1]:
            self._squares, vectors = torch.linalg.eigh(standardized @ standardized.T)
            self._directions = vectors.T @ standardized
            self._projected = vectors.T @ target
        else:
            self._squares, vectors = torch.linalg.eigh(standardized.T @ standardized)
            self._directions = vectors.T
            self._projected = vectors.T @ (standardized.T @ target)

    def predict(self, features: Float[Tensor, "Q D"], penalty: float) -> Int[Tensor, " Q"]:
        """Return the class of each row."""
        shrunk = self._projected / (self._squares + penalty)[:, None]
        weights = self._directions.T @ shrunk
        scores = self._standardize(features.double()) @ weights + self._bias
        return scores.argmax(dim=1)

    def _standardize(self, features: Float[Tensor, "Q D"]) -> Float[Tensor, "Q D"]:
        return (features - self._mean) / self._std


def fit_linear(queries: Videos, training: Videos) -> Fitted:
    """Classify by ridge regression, whose penalty is chosen within the training videos."""
    num_classes = count_classes(queries, training)
    penalty = DEFAULT_RIDGE_PENALTY
    folds = split_folds(training, RIDGE_FOLDS)
    if folds:
        num_right = np.zeros(len(RIDGE_PENALTIES))
        for learned, validated in folds:
            path = RidgePath(training.select(learned), num_classes)
            of_fold = training.select(validated)
            for index, candidate in enumerate(RIDGE_PENALTIES):
                predicted = path.predict(of_fold.features, candidate)
                num_right[index] += int((predicted == of_fold.labels).sum())
        penalty = float(RIDGE_PENALTIES[num_right.argmax()])
    predicted = RidgePath(training, num_classes).predict(queries.features, penalty)
    return Fitted(predicted, penalty)


def count_classes(queries: Videos, training: Videos) -> int:
    return int(max(training.labels.max(), queries.labels.max())) + 1


class AttentiveWeights(NamedTuple):
    """The parameters of the attentive classifier: M·D + C·(D + 1)."""

    queries: Float[Tensor, "M D"]
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]


def compute_logits(
    tokens: Float[Tensor, "V N D"], weights: AttentiveWeights
) -> Float[Tensor, "V C"]:
    """Pool tokens by attention to learned queries, and classify what they pool.

    There are no projections: keys and values are the tokens, and query m pools the m-th of M parts
    of the channels (efficient probing, Psomas et al. 2025, arXiv 2506.10178). With 8 queries, 192
    channels and 10 classes, these are 3,466 parameters.
    """
    num_queries = len(weights.queries)
    attention = (tokens @ weights.queries.T).softmax(dim=1)
    # Each query pools all channels, of which its own are taken: a product of matrices, which reads
    # the tokens once, takes less time than eight times fewer multiplications in parts.
    pooled = attention.mT @ tokens
    parts = pooled.unflatten(2, (num_queries, -1)).diagonal(dim1=1, dim2=2)
    pooled = parts.mT.flatten(1)
    return pooled @ weights.weight.T + weights.bias


def fit_attentive(
    queries: Videos,
    query_tokens: Float[Tensor, "Q N D"],
    training: Videos,
    tokens: Float[Tensor, "V N D"],
) -> Fitted:
    """Classify videos by their tokens, standardized per channel."""
    mean = tokens.mean(dim=(0, 1))
    # A channel that is the same everywhere has no deviation to divide by.
    std = tokens.std(dim=(0, 1)) + 1e-6
    tokens = (tokens - mean) / std
    num_classes = count_classes(queries, training)
    penalty = DEFAULT_ATTENTIVE_PENALTY
    folds = split_folds(training, ATTENTIVE_FOLDS)
    if folds:
        num_right = np.zeros(len(ATTENTIVE_PENALTIES))
        for learned, validated in folds:
            labels = training.labels[learned]
            path = follow_penalties(tokens[learned], labels, num_classes)
            for index, weights in enumerate(path):
                predicted = compute_logits(tokens[validated], weights).argmax(dim=1)
                num_right[index] += (predicted == training.labels[validated]).sum()
        penalty = ATTENTIVE_PENALTIES[int(num_right.argmax())]
    path = follow_penalties(tokens, training.labels, num_classes, last=penalty)
    logits = compute_logits((query_tokens - mean) / std, path[-1])
    return Fitted(logits.argmax(dim=1), penalty)


def follow_penalties(
    tokens: Float[Tensor, "V N D"],
    labels: Int[Tensor, " V"],
    num_classes: int,
    last: float = ATTENTIVE_PENALTIES[-1],
) -> list[AttentiveWeights]:
    """Fit with weaker and weaker penalties, to `last`; return the weights for each.

    All begin at zero, where attention is uniform and pooling a mean: nothing is random.
    """
    width = tokens.shape[2]
    num_queries = math.gcd(MAX_QUERIES, width)
    weights = AttentiveWeights(
        torch.zeros(num_queries, width), torch.zeros(num_classes, width), torch.zeros(num_classes)
    )
    path = []
    for penalty in ATTENTIVE_PENALTIES:
        weights = minimize_loss(tokens, labels, weights, penalty)
        path.append(weights)
        if penalty <= last:
            break
    return path


def minimize_loss(
    tokens: Float[Tensor, "V N D"],
    labels: Int[Tensor, " V"],
    initial: AttentiveWeights,
    penalty: float,
) -> AttentiveWeights:
    """Return weights of the least cross-entropy plus `penalty` times their squares, by L-BFGS."""
    weights = AttentiveWeights(*(tensor.clone().requires_grad_() for tensor in initial))
    optimizer = torch.optim.LBFGS(weights, max_iter=MAX_STEPS, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        squares = weights.queries.square().sum() + weights.weight.square().sum()
        loss = F.cross_entropy(compute_logits(tokens, weights), labels) + penalty * squares
        loss.backward()
        return loss

    with limit_threads(tokens.numel() // NUMBERS_PER_THREAD):
        optimizer.step(compute_loss)
    return AttentiveWeights(*(tensor.detach() for tensor in weights))


@contextmanager
def limit_threads(maximum: int) -> Iterator[None]:
    """Let torch use so many threads, and at least one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(maximum, num_threads)))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)

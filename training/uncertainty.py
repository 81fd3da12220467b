"""Give accuracies their standard errors, by bootstrap over groups of videos."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

# The error of the error is then 2 %.
NUM_RESAMPLES = 1000


class Estimate(NamedTuple):
    """An accuracy, or a difference of two, with its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def estimate_accuracy(is_right: Bool[np.ndarray, " V"], groups: Int[np.ndarray, " V"]) -> Estimate:
    """Return the fraction of videos that are right, with its standard error over groups.

    One right and one wrong video are added to estimate the error, so that it is not 0 where all
    are right. Without them and with groups of one video, it is the binomial one.
    """
    value = float(np.mean(is_right))
    return Estimate(value, bootstrap_error(*add_groups(is_right.astype(float), groups, (1, 0))))


def estimate_difference(
    is_right: Bool[np.ndarray, " V"],
    is_right_baseline: Bool[np.ndarray, " V"],
    groups: Int[np.ndarray, " V"],
) -> Estimate:
    """Return by how much an accuracy exceeds another one on the same videos, with its error.

    The difference of paired results varies less than the accuracies do, as some videos are hard
    for both. To estimate the error, a video is added that only the first gets right, and one that
    only the second does (Bonett and Price 2012), so that it is not 0 for a single group.
    """
    gain = is_right.astype(float) - is_right_baseline.astype(float)
    return Estimate(float(gain.mean()), bootstrap_error(*add_groups(gain, groups, (1, -1))))


def add_groups(
    values: Float[np.ndarray, " V"], groups: Int[np.ndarray, " V"], added: tuple[float, float]
) -> tuple[Float[np.ndarray, " W"], Int[np.ndarray, " W"]]:
    """Return values and groups with two more values, each a group of its own."""
    return np.append(values, added), np.append(groups, groups.max() + np.array([1, 2]))


def bootstrap_error(values: Float[np.ndarray, " V"], groups: Int[np.ndarray, " V"]) -> float:
    """Return the standard error of the mean of values that depend on each other within groups.

    It is the standard deviation of the mean over resamples of whole groups, drawn with replacement
    with a fixed seed, so that it is the same every time.
    """
    _, numbers = np.unique(groups, return_inverse=True)
    sums = np.bincount(numbers, weights=values)
    sizes = np.bincount(numbers)
    num_groups = len(sizes)
    probabilities = np.full(num_groups, 1 / num_groups)
    random = np.random.default_rng(0)
    means = np.empty(NUM_RESAMPLES)
    # One by one: all at once would take a gigabyte for 100,000 groups.
    for index in range(NUM_RESAMPLES):
        # How often each group is in the resample.
        counts = random.multinomial(num_groups, probabilities)
        means[index] = (counts @ sums) / (counts @ sizes)
    return float(means.std())

"""Random numbers that are a pure function of (seed, purpose, place): no generator is carried from step to step.

Philox's raw 64-bit words are used and turned into numbers here, because NumPy promises that only the raw stream of a
bit generator stays the same between its versions.
"""

import threading
from enum import IntEnum
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

_generators = threading.local()


class Purpose(IntEnum):
    """What a draw is for; each has a stream of its own."""

    SHARD_ORDER = 1
    SAMPLE_ORDER = 2
    MIX_ORDER = 3
    FRAMES = 4
    CROP = 5
    REPLACEMENT = 6
    AUGMENT = 7
    NODE_ORDER = 8
    CLASS_BALANCE = 9


def random_words(
    seed: int, purpose: Purpose, place: tuple[int, int, int], count: int, first: int = 0
) -> UInt64[np.ndarray, " count"]:
    """`count` words from word `first` on, wherever that is; streams of different places do not overlap (fewer than
    2^66 words are drawn from one)."""
    block, skipped = divmod(first, 4)  # a counter gives four words
    if not hasattr(
        _generators, "own"
    ):  # a new one asks the system for a seed: .05 ms, and a clip needs two or three
        _generators.own = np.random.Philox(0)
    generator: np.random.Philox = _generators.own
    state: Any = {
        "bit_generator": "Philox",
        "state": {"counter": (block, *place), "key": (seed % 2**64, purpose)},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    generator.state = state
    words: UInt64[np.ndarray, " count"] = generator.random_raw(skipped + count)
    return words[skipped:]


def uniforms(seed: int, purpose: Purpose, place: tuple[int, int, int], count: int) -> list[float]:
    """`count` numbers in [0, 1)."""
    numbers: list[float] = (
        (random_words(seed, purpose, place, count) >> np.uint64(11)) * 2.0**-53
    ).tolist()
    return numbers


def permutation(
    seed: int, purpose: Purpose, place: tuple[int, int, int], count: int
) -> Int[np.ndarray, " count"]:
    """A permutation of 0..count-1."""  # NumPy takes 32 ms for 390,000, PyTorch 11, but decode workers do without it
    return np.argsort(random_words(seed, purpose, place, count), kind="stable")

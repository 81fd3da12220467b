"""Choose the video at each place of the endless training stream.

Shards follow each other in random order, another one in every epoch, and the samples of every `shuffle_shards` of them,
a window, are shuffled together. Nothing is laid out before it is reached (13 ms for the order of 390,000 shards at the
beginning of an epoch, 1 ms for a window of 4,096 samples).

Canonical nodes, as in mosaicml/streaming: the shards are divided once per run into groups of equally many samples, and
the places of a step into as many equal parts, each filled from one group. A node that serves some groups reads their
shards alone in every epoch, whatever the number of nodes; only at the cuts, two groups share a shard.

Mixes: in each block of each epoch of the mix, a dataset has a fixed number of places, in random order, which it fills
from its own endless stream. A small dataset is repeated more often than the mix, whole each time.

Class balance: the places of a window are shared among its samples by the size of their class in the dataset: of 100
million samples no more labels are looked at than a window's.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int

from adamae.common.arithmetic import ceil_div
from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning import rng
from adamae.pipeline.planning.rng import Purpose
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import UNLABELED

MIX_BLOCK = 2**13  # places of a mix whose order is computed at once, in .5 ms
NEARBY_ATTEMPTS = (
    8  # replacements from one window, which may be small, or all bad; then any video is tried
)
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples lie far apart

Samples = range | Int[np.ndarray, " samples"]
# Pieces of shards in the order of these: of each, its first sample among those of the dataset that take part, and how
# many there are, at least one.
Spans = Int[np.ndarray, "spans 2"]


class SampleOrder:
    """Gives sample numbers of one or several datasets for draws, which are places of the endless stream."""

    def __init__(
        self, dataset: ShardDataset, config: DataConfig, seed: int, step_size: int, num_served: int
    ) -> None:
        """Divide the shards; `step_size`: draws per step, `num_served`: canonical nodes that this process serves.

        Raises InputError if data.canonical_nodes does not fit the step or the dataset, or data.subset the dataset.
        """
        self._arguments = dataset, config, seed, step_size, num_served
        self._nodes, self._step_size = config.canonical_nodes, step_size
        if step_size % self._nodes:
            raise InputError(
                f"data.canonical_nodes is {self._nodes}, but a step decodes {step_size} videos: choose a divisor"
            )
        self._seed, self._window_shards = seed, config.shuffle_shards
        members = _list_members(dataset, config)
        self._samples = [samples for samples, _ in members]
        sizes = np.array([len(samples) for samples in self._samples])
        if sizes.min() < self._nodes:
            raise InputError(
                f"data.canonical_nodes is {self._nodes}, but a dataset has only {sizes.min()} videos: choose fewer"
            )
        self._spans = [spans for _, spans in members]
        for part, spans in enumerate(
            self._spans if self._nodes > 1 else ()
        ):  # as nodes divide the shards
            self._spans[part] = spans[
                rng.permutation(seed, Purpose.NODE_ORDER, (part, 0, 0), len(spans))
            ]
        self._tables = dataset.parts
        self._class_weights = (
            _weigh_classes(dataset, config, self._samples) if config.class_balance else []
        )
        weights = np.array(config.weights or sizes, dtype=np.float64)
        # Rounding up gives every dataset at least one place.
        self._places = np.ceil(sizes.sum() * weights / weights.sum() - 1e-9).astype(np.int64)
        self.epoch_size = int(self._places.sum())
        self._num_blocks = ceil_div(self.epoch_size, MIX_BLOCK)
        self._mix_block = lru_cache(maxsize=2 * num_served)(self._shuffle_mix_block)
        streams = 2 * num_served * len(members)
        self._node_spans = lru_cache(maxsize=streams)(self._cut_spans)
        self._epoch = lru_cache(maxsize=3 * streams)(self._shuffle_shards)
        # The window in use, the one that the look-ahead is in, and those that follow them.
        self._window = lru_cache(maxsize=4 * streams)(self._shuffle_window)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickled, an order is what it was made of."""
        return SampleOrder, self._arguments

    def sample(self, draw: int) -> int:
        """Look up the sample of draw 0, 1, 2, … of the run."""
        part, node, place = self._locate(draw)
        window, inside = self._find_window(part, node, place)
        return int(self._samples[part][int(window[inside])])

    def replacement(self, draw: int, fraction: float, attempt: int) -> int:
        """Choose sample number `fraction` in [0, 1) of the draw's window, whose shards are local, instead of its own;
        after NEARBY_ATTEMPTS, of the whole dataset."""
        part, node, place = self._locate(draw)
        candidates: Samples = range(len(self._samples[part]))
        if attempt <= NEARBY_ATTEMPTS:
            candidates, _ = self._find_window(part, node, place)
        return int(self._samples[part][int(candidates[int(fraction * len(candidates))])])

    def _locate(self, draw: int) -> tuple[int, int, int]:
        """Return the dataset of a draw, its canonical node, and the place in that node's stream of the dataset."""
        step, inside = divmod(draw, self._step_size)
        share = self._step_size // self._nodes
        node, inside = divmod(inside, share)
        place = step * share + inside
        if len(self._samples) == 1:
            return 0, node, place
        epoch, inside = divmod(place, self.epoch_size)
        block = inside * self._num_blocks // self.epoch_size
        while self._places_before(block + 1).sum() <= inside:
            block += 1
        before = self._places_before(block)
        part, earlier = self._mix_block(node, epoch, block)[inside - int(before.sum())].tolist()
        return part, node, epoch * int(self._places[part]) + int(before[part]) + earlier

    def _places_before(self, block: int) -> Int[np.ndarray, " parts"]:
        """Count the places of an epoch that each dataset has before a block of the mix."""
        return block * self._places // self._num_blocks

    def _shuffle_mix_block(self, node: int, epoch: int, block: int) -> Int[np.ndarray, "places 2"]:
        """Return the dataset at each place of a block of the mix, and the places that it has before in the block."""
        counts = self._places_before(block + 1) - self._places_before(block)
        parts = np.repeat(np.arange(len(counts)), counts)
        parts = parts[
            rng.permutation(self._seed, Purpose.MIX_ORDER, (epoch, node, block), len(parts))
        ]
        earlier = np.empty_like(parts)
        for part, count in enumerate(counts.tolist()):
            earlier[parts == part] = np.arange(count)
        return np.stack([parts, earlier], axis=1)

    def _share(self, part: int, node: int) -> tuple[int, int]:
        """Return which of a dataset's samples belong to a canonical node: from the first to before the last number."""
        size = len(self._samples[part])
        return node * size // self._nodes, (node + 1) * size // self._nodes

    def _cut_spans(self, part: int, node: int) -> Spans:
        """Cut the samples that belong to a canonical node out of a dataset."""
        spans, (begin, end) = self._spans[part], self._share(part, node)
        ends = np.cumsum(spans[:, 1])
        first, last = ends.searchsorted([begin, end - 1], side="right").tolist()
        cut = spans[first : last + 1].copy()
        skipped = begin - int(ends[first] - cut[0, 1])
        cut[0] += (skipped, -skipped)
        cut[-1, 1] -= int(ends[last]) - end
        return cut[np.argsort(cut[:, 0])]

    def _find_window(
        self, part: int, node: int, place: int
    ) -> tuple[Int[np.ndarray, " samples"], int]:
        """Return the samples, in order, of the window that a place of a node's stream is in, and the place in it."""
        begin, end = self._share(part, node)
        epoch, place = divmod(place, end - begin)
        _, ends = self._epoch(part, node, epoch)
        number = int(ends.searchsorted(place, side="right")) // self._window_shards
        before = int(ends[number * self._window_shards - 1]) if number else 0
        return self._window(part, node, epoch, number), place - before

    def _shuffle_shards(
        self, part: int, node: int, epoch: int
    ) -> tuple[Int[np.ndarray, " spans"], Int[np.ndarray, " spans"]]:
        """Order a node's spans in an epoch; return that and the number of samples up to the end of each."""
        counts = self._node_spans(part, node)[:, 1]
        order = rng.permutation(self._seed, Purpose.SHARD_ORDER, (epoch, part, node), len(counts))
        return order, np.cumsum(counts[order])

    def _shuffle_window(
        self, part: int, node: int, epoch: int, number: int
    ) -> Int[np.ndarray, " samples"]:
        spans, (order, _) = self._node_spans(part, node), self._epoch(part, node, epoch)
        pieces = spans[
            np.sort(order[number * self._window_shards : (number + 1) * self._window_shards])
        ].tolist()
        samples = np.concatenate([np.arange(first, first + count) for first, count in pieces])
        place = epoch, part, 0
        words = [
            rng.random_words(self._seed, Purpose.SAMPLE_ORDER, place, count, first)
            for first, count in pieces
        ]
        samples = samples[np.argsort(np.concatenate(words), kind="stable")]
        return (
            self._balance(part, samples, (epoch, part, pieces[0][0]))
            if self._class_weights
            else samples
        )

    def _balance(
        self, part: int, samples: Int[np.ndarray, " samples"], place: tuple[int, int, int]
    ) -> Int[np.ndarray, " samples"]:
        """Repeat some samples of a window and leave out others, as many in all, and shuffle them.

        A sample with a share s of the window's weight gets s * len(samples) places, rounded up or down at random.
        """
        members, table = self._samples[part], self._class_weights[part]
        rows = samples if isinstance(members, range) else members[samples]  # of the dataset's table
        weights = [
            max((table.get(label, table[UNLABELED]) for label in labels), default=table[UNLABELED])
            for labels in self._tables[part].read_labels(rows)
        ]
        words = rng.random_words(self._seed, Purpose.CLASS_BALANCE, place, len(samples) + 1)
        ends = np.cumsum(weights)
        ends = np.minimum(
            ends / ends[-1] * len(samples) + (words[-1] >> np.uint64(11)) / 2**53, len(samples)
        )
        counts = np.diff(np.floor(ends).astype(np.int64), prepend=0)
        return np.repeat(samples, counts)[np.argsort(words[:-1], kind="stable")]


def _list_members(dataset: ShardDataset, config: DataConfig) -> Sequence[tuple[Samples, Spans]]:
    """List the samples of each dataset of the mix that take part, and their shards."""
    if config.subset is not None:
        if len(dataset.parts) > 1:
            raise InputError(
                "data.subset does not go with a mix of datasets: give one folder in data.shards"
            )
        samples = choose_subset(dataset, config)
        return [(samples, _list_spans(np.unique(dataset.shard_of(samples), return_counts=True)[1]))]
    ends = np.cumsum([part.counts.sum() for part in dataset.parts]).tolist()
    return [
        (range(start, end), _list_spans(part.counts))
        for start, end, part in zip([0, *ends], ends, dataset.parts, strict=False)
    ]


def _list_spans(counts: Int[np.ndarray, " shards"]) -> Spans:
    counts = counts[counts > 0]
    return np.column_stack((np.cumsum(counts) - counts, counts))


def _weigh_classes(
    dataset: ShardDataset, config: DataConfig, members: Sequence[Samples]
) -> list[dict[int, float]]:
    """Compute the weight of each class's samples in each dataset of the mix; unlabeled ones get the lowest. Raises
    InputError if there are no classes."""
    if not dataset.info.classes:
        raise InputError(
            f"data.class_balance is {config.class_balance:g}, but {dataset.folder} has no labels: remove it"
        )
    found = []
    for tables, samples in zip(dataset.parts, members, strict=True):
        histogram = tables.info.report.get(
            "class_histogram"
        )  # of all samples; in a subset they are counted
        if histogram and isinstance(samples, range):
            counts = {
                label: histogram.get(name, 0) for label, name in enumerate(dataset.info.classes)
            }
        else:
            rows = np.arange(len(tables)) if isinstance(samples, range) else samples
            counts = Counter(chain.from_iterable(tables.read_labels(rows)))
        weights = {label: count**-config.class_balance for label, count in counts.items() if count}
        found.append(weights | {UNLABELED: min(weights.values(), default=1.0)})
    return found


def choose_subset(dataset: ShardDataset, config: DataConfig) -> Samples:
    """Choose the samples of data.subset, or all, by content: nested, and the same ones however they were sharded.
    Raises InputError if there are fewer."""
    count = config.subset
    if count is None:
        return range(len(dataset.samples))
    if count > len(dataset.samples):
        raise InputError(
            f"data.subset is {count}, but {dataset.folder} holds only {len(dataset.samples)} videos"
        )
    hashes = dataset.column("sha256").view(">u8").reshape(-1, 4)
    # Those with the smallest hashes; seen from another seed's number, others are.
    hashes = np.column_stack(
        (hashes[:, 0] ^ np.uint64(config.subset_seed * GOLDEN % 2**64), hashes[:, 1:])
    )
    return np.sort(np.lexsort(hashes.T[::-1])[:count])

"""Choose the video of each decode of the endless training stream.

The words of this file, from the large to the small:

- stream: the samples (videos) that training decodes, endlessly. Decodes are numbered 0, 1, 2, …;
  `step_size` of them are a step. Positions, in plan.py, number clips: with data.repeats, several
  clips share a decode.
- canonical node, as in mosaicml/streaming: owns equally many samples as every other one, the same
  in every epoch, and fills the same part of every step. A machine that serves some nodes reads
  their shards alone, however many machines there are; a shard is split between nodes only at the
  borders of their ranges.
- mix: several datasets with weights. Each block of a node's stream has a fixed number of decodes of
  every dataset, in random order, from the dataset's own endless stream. So a small dataset is
  repeated more often; before it repeats, every sample has come once.
- epoch: a pass of a node over its samples of one dataset. Its spans follow each other in random
  order, another one in every epoch. `SampleOrder.epoch_size`, though, counts the decodes of an
  epoch of all nodes and datasets together.
- span: consecutive samples of one shard. It is the whole shard, unless nodes share it, or a subset
  leaves out some.
- window: `shuffle_shards` consecutive spans of an epoch, whose samples are shuffled together.

Without nodes, a mix or class balance, the samples of an epoch are these (`counts` of each shard
that has any):

    # When each shard's turn comes in the epoch: 0 for the first shard.
    turns = np.argsort(rng.permutation(seed, Purpose.SHARD_ORDER, (epoch, 0, 0), len(counts)))
    # The window of each sample, which is that of its shard.
    windows = np.repeat(turns // shuffle_shards, counts)
    # A random word for each sample.
    words = rng.random_words(seed, Purpose.SAMPLE_ORDER, (epoch, 0, 0), counts.sum())
    # Sort by window, and within a window by word.
    samples = np.lexsort((words, windows))

The code gives the same without laying out an epoch before it is reached: at the beginning of one it
orders the spans (13 ms for 390,000), and then window by window the samples (1 ms for 4,096).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from adamae.common.arithmetic import ceil_div
from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning import rng
from adamae.pipeline.planning.rng import Purpose
from adamae.pipeline.reading.cache import locked
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import UNLABELED
from adamae.pipeline.shards.index import BLOCK_ROWS, Tables

# Datasets with more samples than this keep their subsets in the cache; fewer take .2 s.
STORED_ABOVE = 2**20
# The most decodes of a node whose datasets are drawn at once, in .5 ms.
MIX_BLOCK = 2**13
# A window may be small, or all its videos may be broken: then, any video of the dataset is tried.
NEARBY_ATTEMPTS = 8
# 2^64 divided by the golden ratio, whose multiples lie far apart (Knuth, TAOCP 6.4).
GOLDEN = 0x9E3779B97F4A7C15

Ints = Int[np.ndarray, " n"]
Samples = range | Ints
# The first sample of each span and how many it has, at least one. Samples are numbered among those
# that take part.
Spans = Int[np.ndarray, "spans 2"]


@dataclass(frozen=True)
class Member:
    """A dataset of the mix, and its samples that take part: all (a range) or a subset."""

    tables: Tables
    samples: Samples
    spans: Spans


class SampleOrder:
    """The order of the samples of a dataset, or of a mix of several.

    For example, a dataset has shards of 3, 2, 4, 2 and 1 samples: 0-2, 3-4, 5-8, 9-10 and 11. Two
    canonical nodes fill half of every step of 4 decodes each, and 2 spans make a window.

    1. The shards are divided once, in random order: 11, 3-4, 5-8, 0-2, 9-10. Node 0 owns the first
       six samples, the spans 11, 3-4 and 5-7; node 1 owns 8, 0-2 and 9-10.
    2. In epoch 0, node 0 takes its spans in the order 3-4, 11, 5-7, and node 1 in the order 8,
       9-10, 0-2. So the windows of node 0 hold 3, 4, 11 and 5, 6, 7; those of node 1 hold 8, 9, 10
       and 0, 1, 2.
    3. Each window is shuffled: node 0 gives 4, 11, 3 and 5, 7, 6; node 1 gives 8, 10, 9 and
       1, 0, 2.
    4. A step takes the next two samples of each node. Epoch 1 begins at decode 12.

    >>> config = DataConfig(canonical_nodes=2, shuffle_shards=2)
    >>> order = SampleOrder(dataset, config, seed=9, step_size=4, num_cached_nodes=2)
    >>> [order.sample(decode) for decode in range(12)]
    [4, 11, 8, 10, 3, 5, 9, 1, 7, 6, 0, 2]
    """

    def __init__(
        self,
        dataset: ShardDataset,
        config: DataConfig,
        seed: int,
        step_size: int,
        num_cached_nodes: int,
    ) -> None:
        """Divide the shards among the nodes.

        step_size: decodes of a step; num_cached_nodes: the number of canonical nodes that this
        process reads, which only sizes the caches. Raise InputError if data.canonical_nodes does
        not fit the step or the dataset, data.subset asks for more videos than there are, or
        data.class_balance for classes that are not there.
        """
        self._arguments = (dataset, config, seed, step_size, num_cached_nodes)
        num_nodes = config.canonical_nodes
        if step_size % num_nodes:
            raise InputError(
                f"data.canonical_nodes is {num_nodes}, but a step decodes {step_size} videos:"
                " choose a divisor"
            )
        self._step_size = step_size
        self._node_step_size = step_size // num_nodes

        members = _list_members(dataset, config)
        sizes = np.array([len(member.samples) for member in members])
        if sizes.min() < num_nodes:
            raise InputError(
                f"data.canonical_nodes is {num_nodes}, but a dataset has only {sizes.min()} videos:"
                " choose fewer"
            )
        if config.class_balance and not dataset.info.classes:
            raise InputError(
                f"data.class_balance is {config.class_balance:g}, but {dataset.folder} has no"
                " labels: remove it"
            )
        self._datasets = [
            DatasetOrder(member, dataset_id, config, seed, num_cached_nodes)
            for dataset_id, member in enumerate(members)
        ]
        weights = np.array(config.weights or sizes, dtype=np.float64)
        # Rounding up gives every dataset at least one decode.
        counts = np.ceil(sizes.sum() * weights / weights.sum() - 1e-9).astype(np.int64)
        self._mix = MixOrder(counts, seed, num_cached_nodes)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the arguments alone: caches are not sent."""
        return SampleOrder, self._arguments

    @property
    def epoch_size(self) -> int:
        """The number of decodes of an epoch of all datasets and nodes together."""
        return self._mix.epoch_size

    def sample(self, decode: int) -> int:
        """Return the sample of a decode, by its number in the stream."""
        dataset_order, node, offset = self._locate(decode)
        return dataset_order.sample(node, offset)

    def replacement(self, decode: int, fraction: float, attempt: int) -> int:
        """Choose a sample instead of that of a decode, which is broken.

        fraction: a random number in [0, 1), which chooses among the samples of the same window,
        whose shards are local; after NEARBY_ATTEMPTS, among those of the whole dataset.
        """
        dataset_order, node, offset = self._locate(decode)
        if attempt <= NEARBY_ATTEMPTS:
            return dataset_order.pick_nearby(node, offset, fraction)
        return dataset_order.pick(fraction)

    def _locate(self, decode: int) -> tuple["DatasetOrder", int, int]:
        """Return the dataset and node of a decode, and the offset in the node's stream of it."""
        step, index = divmod(decode, self._step_size)
        node, index = divmod(index, self._node_step_size)
        offset = step * self._node_step_size + index
        dataset_id = 0
        if len(self._datasets) > 1:
            dataset_id, offset = self._mix.locate(node, offset)
        return self._datasets[dataset_id], node, offset


class MixOrder:
    """Which dataset fills each offset of a node's stream."""

    def __init__(self, counts: Ints, seed: int, num_cached_nodes: int) -> None:
        """Count the blocks of an epoch, which is here `epoch_size` decodes of a single node.

        counts: decodes of each dataset in an epoch; num_cached_nodes: see SampleOrder.
        """
        self.epoch_size = int(counts.sum())
        self._counts = counts
        self._seed = seed
        self._num_blocks = ceil_div(self.epoch_size, MIX_BLOCK)
        # For each node, the block that clips are decoded from, and the one that shards are looked
        # ahead in.
        self._block = lru_cache(maxsize=2 * num_cached_nodes)(self._shuffle_block)

    def locate(self, node: int, offset: int) -> tuple[int, int]:
        """Return the dataset at an offset of a node's stream.

        Return also the offset in the stream that the node takes from this dataset.
        """
        epoch, index = divmod(offset, self.epoch_size)
        # The estimate is never too large, so search upwards.
        block = index * self._num_blocks // self.epoch_size
        while self._count_before(block + 1).sum() <= index:
            block += 1
        counts_before = self._count_before(block)
        index -= int(counts_before.sum())
        dataset_id, index_in_block = self._block(node, epoch, block)[index].tolist()
        index_in_epoch = int(counts_before[dataset_id]) + index_in_block
        return dataset_id, epoch * int(self._counts[dataset_id]) + index_in_epoch

    def _count_before(self, block: int) -> Ints:
        """Count the samples of each dataset in an epoch before a block."""
        return block * self._counts // self._num_blocks

    def _shuffle_block(self, node: int, epoch: int, block: int) -> Int[np.ndarray, "decodes 2"]:
        """Return the dataset of each decode of a block, and the index in its part of the block.

        For example, two datasets with 3 samples and 1 may give [[0, 0], [1, 0], [0, 1], [0, 2]].
        """
        counts = self._count_before(block + 1) - self._count_before(block)
        sorted_ids = np.repeat(np.arange(len(counts)), counts)
        counter = (epoch, node, block)
        order = rng.permutation(self._seed, Purpose.MIX_ORDER, counter, len(sorted_ids))
        dataset_ids = sorted_ids[order]
        indices = np.empty_like(dataset_ids)
        for dataset_id, count in enumerate(counts.tolist()):
            indices[dataset_ids == dataset_id] = np.arange(count)
        return np.stack([dataset_ids, indices], axis=1)


class DatasetOrder:
    """The endless stream of samples that each canonical node takes from one dataset."""

    def __init__(
        self, member: Member, dataset_id: int, config: DataConfig, seed: int, num_cached_nodes: int
    ) -> None:
        """Divide the spans of a dataset among the nodes; num_cached_nodes: see SampleOrder."""
        self._member = member
        self._id = dataset_id
        self._seed = seed
        self._num_nodes = config.canonical_nodes
        self._window_spans = config.shuffle_shards
        self._class_weights: dict[int, float] = {}
        if config.class_balance:
            self._class_weights = _weigh_classes(member, config.class_balance)
        self._spans = member.spans
        if self._num_nodes > 1:
            # Neighboring shards may hold similar videos, and a node should see all kinds.
            counter = (dataset_id, 0, 0)
            order = rng.permutation(seed, Purpose.NODE_ORDER, counter, len(member.spans))
            self._spans = member.spans[order]
        # A node's stream is read at two offsets: where clips are decoded, and where shards are
        # looked ahead. At either, the next epoch and the next window are asked for before the last
        # one is done with.
        num_readers = 2 * num_cached_nodes
        self._node_spans = lru_cache(maxsize=num_readers)(self._cut_spans)
        self._epoch = lru_cache(maxsize=3 * num_readers)(self._order_spans)
        self._window = lru_cache(maxsize=4 * num_readers)(self._shuffle_window)

    def sample(self, node: int, offset: int) -> int:
        """Return the sample at an offset of a node's stream."""
        window, index = self._find_window(node, offset)
        number = int(window[index])
        return int(self._member.samples[number])

    def pick_nearby(self, node: int, offset: int, fraction: float) -> int:
        """Return the sample at a fraction in [0, 1) of the window that holds an offset."""
        window, _ = self._find_window(node, offset)
        number = int(window[int(fraction * len(window))])
        return int(self._member.samples[number])

    def pick(self, fraction: float) -> int:
        """Return the sample at a fraction in [0, 1) of the dataset."""
        samples = self._member.samples
        return int(samples[int(fraction * len(samples))])

    def _find_window(self, node: int, offset: int) -> tuple[Ints, int]:
        """Return the samples of the window that holds an offset, and the index in it."""
        begin, end = self._node_range(node)
        epoch, index = divmod(offset, end - begin)
        _, ends = self._epoch(node, epoch)
        window = int(ends.searchsorted(index, side="right")) // self._window_spans
        start = 0
        if window > 0:
            start = int(ends[window * self._window_spans - 1])
        return self._window(node, epoch, window), index - start

    def _node_range(self, node: int) -> tuple[int, int]:
        """Return the first sample of a node and the first behind its last, span after span."""
        size = len(self._member.samples)
        begin = node * size // self._num_nodes
        end = (node + 1) * size // self._num_nodes
        return begin, end

    def _cut_spans(self, node: int) -> Spans:
        """Return the spans of a node, sorted; other nodes may own other parts of their shards."""
        begin, end = self._node_range(node)
        ends = np.cumsum(self._spans[:, 1])
        first = int(ends.searchsorted(begin, side="right"))
        last = int(ends.searchsorted(end - 1, side="right"))
        spans = self._spans[first : last + 1].copy()
        # Samples of the first span that the node before owns, and of the last one, the next node.
        num_before = begin - int(ends[first] - spans[0, 1])
        num_behind = int(ends[last]) - end
        spans[0, 0] += num_before
        spans[0, 1] -= num_before
        spans[-1, 1] -= num_behind
        return spans[np.argsort(spans[:, 0])]

    def _order_spans(self, node: int, epoch: int) -> tuple[Ints, Ints]:
        """Return the order of a node's spans in an epoch, and where each ends in the epoch."""
        counts = self._node_spans(node)[:, 1]
        counter = (epoch, self._id, node)
        order = rng.permutation(self._seed, Purpose.SHARD_ORDER, counter, len(counts))
        return order, np.cumsum(counts[order])

    def _shuffle_window(self, node: int, epoch: int, window: int) -> Ints:
        """Return the samples of a window in random order, balanced if classes are to be."""
        order, _ = self._epoch(node, epoch)
        start = window * self._window_spans
        in_window = np.sort(order[start : start + self._window_spans])
        spans = self._node_spans(node)[in_window].tolist()
        counter = (epoch, self._id, 0)
        samples = []
        words = []
        for first, count in spans:
            samples.append(np.arange(first, first + count))
            # The word of a sample follows from its number, whatever else is in the window.
            words.append(rng.random_words(self._seed, Purpose.SAMPLE_ORDER, counter, count, first))
        shuffle = np.argsort(np.concatenate(words), kind="stable")
        shuffled = np.concatenate(samples)[shuffle]
        if not self._class_weights:
            return shuffled
        first_sample = spans[0][0]
        return self._balance(shuffled, (epoch, self._id, first_sample))

    def _balance(self, samples: Ints, counter: tuple[int, int, int]) -> Ints:
        """Repeat some samples of a window and leave out others, as many in all, and shuffle them.

        This is systematic resampling: a sample whose weight is a fraction f of the window's gets f
        * len(samples) decodes, rounded up or down at random. For example, weights 1, 1 and 2 give
        .75, .75 and 1.5 decodes, which end at .75, 1.5 and 3; moved by the random number .4, they
        end at 1.15, 1.9 and 3 (the end stays), rounded down at 1, 1 and 3: the samples are repeated
        1, 0 and 2 times. Only the labels of the window are read.
        """
        rows = samples
        if not isinstance(self._member.samples, range):
            rows = self._member.samples[samples]
        weights = [self._weigh_sample(labels) for labels in self._member.tables.read_labels(rows)]
        count = len(samples)
        purpose = Purpose.CLASS_BALANCE
        words = rng.random_words(self._seed, purpose, counter, count)
        (shift,) = rng.uniforms(self._seed, purpose, counter, 1, first=count)
        ends = np.cumsum(weights)
        ends = ends / ends[-1] * count + shift
        # The last end stays at the number of samples; the shift moves it beyond.
        ends = np.floor(np.minimum(ends, count))
        repeats = np.diff(ends.astype(np.int64), prepend=0)
        shuffle = np.argsort(words, kind="stable")
        return np.repeat(samples, repeats)[shuffle]

    def _weigh_sample(self, labels: tuple[int, ...]) -> float:
        """Return the weight of the rarest class of a sample."""
        lowest = self._class_weights[UNLABELED]
        weights = [self._class_weights.get(label, lowest) for label in labels]
        return max(weights, default=lowest)


def _list_members(dataset: ShardDataset, config: DataConfig) -> list[Member]:
    """List the datasets of the mix. Raise InputError if data.subset does not fit them."""
    if config.subset is not None:
        if len(dataset.parts) > 1:
            raise InputError(
                "data.subset does not go with a mix of datasets: give one folder in data.shards"
            )
        samples = choose_subset(dataset, config)
        _, counts = np.unique(dataset.shard_of(samples), return_counts=True)
        return [Member(dataset.parts[0], samples, _list_spans(counts))]
    members = []
    start = 0
    for tables in dataset.parts:
        end = start + int(tables.counts.sum())
        members.append(Member(tables, range(start, end), _list_spans(tables.counts)))
        start = end
    return members


def _list_spans(counts: Ints) -> Spans:
    """Return the spans of shards with `counts` samples: [3, 0, 2] gives [[0, 3], [3, 2]]."""
    counts = counts[counts > 0]
    return np.column_stack((np.cumsum(counts) - counts, counts))


def _weigh_classes(member: Member, exponent: float) -> dict[int, float]:
    """Return the weight of each class, its number of samples to the power -exponent.

    Unlabeled samples (UNLABELED) get the lowest weight of all.
    """
    tables = member.tables
    samples = member.samples
    histogram = tables.info.report.get("class_histogram")
    counts: Mapping[int, int]
    # The histogram is that of all samples. A subset is counted.
    if histogram and isinstance(samples, range):
        names = zip(tables.label_ids, tables.info.classes, strict=True)
        counts = {label: histogram.get(name, 0) for label, name in names}
    else:
        rows = np.arange(len(tables)) if isinstance(samples, range) else samples
        counts = Counter(chain.from_iterable(tables.read_labels(rows)))
    weights = {label: count**-exponent for label, count in counts.items() if count}
    weights[UNLABELED] = min(weights.values(), default=1.0)
    return weights


def choose_subset(dataset: ShardDataset, config: DataConfig) -> Samples:
    """Return the samples of data.subset, or all.

    They are chosen by their hashes: the same ones however they were sharded, and a larger subset
    holds a smaller one. Raise InputError if there are fewer.
    """
    count = config.subset
    if count is None:
        return range(len(dataset.samples))
    if count > len(dataset.samples):
        raise InputError(
            f"data.subset is {count}, but {dataset.folder} holds only {len(dataset.samples)} videos"
        )
    if len(dataset.samples) <= STORED_ABOVE:
        return _find_smallest_hashes(dataset, count, config.subset_seed)
    # A pass over 100 million hashes takes minutes, so one process of the node makes it. All others,
    # decode workers too, and all evaluations map what it has found.
    name = f"{dataset.digest}-{count}-{config.subset_seed}.npy"
    file = dataset.cache.folder / "subsets" / name
    with locked(file):
        if not file.exists():
            with atomic_write(file) as temporary, temporary.open("wb") as output:
                np.save(output, _find_smallest_hashes(dataset, count, config.subset_seed))
    return np.asarray(np.load(file, mmap_mode="r"))


def _find_smallest_hashes(dataset: ShardDataset, count: int, seed: int) -> Ints:
    """Return the samples with the `count` smallest hashes, ascending.

    Another seed flips other bits, so that others are the smallest. Memory is bounded by `count` and
    the size of a block: of the blocks so far, only the `count` smallest hashes are kept.
    """
    flipped_bits = np.uint64(seed * GOLDEN % 2**64)
    limit = np.uint64(2**64 - 1)
    hashes = np.empty((0, 4), np.uint64)
    samples = np.empty(0, np.int64)
    start = 0
    for block in dataset.read_hashes():
        block[:, 0] ^= flipped_bits
        in_block = np.flatnonzero(block[:, 0] <= limit)
        hashes = np.concatenate((hashes, block[in_block]))
        samples = np.concatenate((samples, start + in_block))
        start += len(block)
        # Seldom enough for the cost of sorting to be that of a few blocks.
        if len(samples) > 2 * count + BLOCK_ROWS:
            smallest = _sort_hashes(hashes)[:count]
            limit = hashes[smallest[-1], 0]
            # In the order of the samples, which decides between copies of a video.
            smallest.sort()
            hashes = hashes[smallest]
            samples = samples[smallest]
    return np.sort(samples[_sort_hashes(hashes)[:count]])


def _sort_hashes(hashes: UInt64[np.ndarray, "rows 4"]) -> Ints:
    """Return the order of hashes; equal ones keep their order."""
    # lexsort takes the most significant key last.
    return np.lexsort((hashes[:, 3], hashes[:, 2], hashes[:, 1], hashes[:, 0]))

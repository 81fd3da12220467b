"""Which video stands at which place of the endless stream of draws.

Shards stand in random order, and the samples of every few of them, a window, are shuffled together. Nothing is laid out
before it is reached: an epoch begins with the order of its shards, a window with that of its samples, whose numbers
are drawn where they stand (13 ms for 390,000 shards, 1 ms for 4,096 samples).

Lanes: the places of a step are cut into equal pieces, lanes, and each walks through shards of its own, so that whoever
serves some lanes reads their shards alone. In every round the shards, in their order, are cut into as many pieces as
there are lanes, equal to one sample; so at the cuts, and there alone, two lanes share a shard.

Mixes: in each epoch of the mix, and in each block of it, a dataset has a fixed number of places, in random order; it
fills them from its own endless stream, so that a small dataset comes round more often than the mix, and each of its
own rounds is complete.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.planning import rng
from pipeline.planning.rng import Purpose
from pipeline.shards.dataset import ShardDataset

MIX_BLOCK = 2**13  # places of a mix whose order is drawn at once, in .5 ms
NEARBY = 8  # replacements in a row out of one window, which may be small, or all bad; then any are tried


class SampleOrder:
    """The samples of one or several datasets, as they follow each other."""

    def __init__(self, dataset: ShardDataset, config: DataConfig, seed: int, *, step: int, served: int) -> None:
        """step: draws of a step; served: lanes that will be asked for, about. Raises InputError if data.canonical_nodes
        does not divide the step or are not of this version, or data.subset is more than there is, or is of a mix."""
        self._seed, self._step, self._lanes = seed, step, config.canonical_nodes
        if step % self._lanes:
            raise InputError(
                f"data.canonical_nodes is {self._lanes}, and a step decodes {step} videos: give a divisor of that"
            )
        self._streams = [
            _Stream(seed, part, members, self._lanes, config.shuffle_shards, served)
            for part, members in enumerate(_members(dataset, config))
        ]
        sizes = np.array([len(stream.samples) for stream in self._streams])
        weights = np.array(config.weights or sizes, dtype=np.float64)
        # Rounding up gives every dataset at least one place.
        self._places = np.ceil(sizes.sum() * weights / weights.sum() - 1e-9).astype(np.int64)
        self.per_epoch = int(self._places.sum())
        self._blocks = -(-self.per_epoch // MIX_BLOCK)
        self._block = lru_cache(maxsize=2 * served)(self._mixed)
        self._part_of = dataset.part_of

    def sample(self, draw: int) -> int:
        """The sample of draw 0, 1, 2, … of the run."""
        stream, lane, place = self._found(draw)
        return stream.sample(lane, place)

    def other(self, draw: int, share: float, attempt: int) -> int:
        """Sample number `share` in [0, 1) of the window that a draw is in: its shards are here, and its lane's own.

        From attempt NEARBY on, of the dataset.
        """
        stream, lane, place = self._found(draw)
        if attempt > NEARBY:
            return int(stream.samples[int(share * len(stream.samples))])
        window, _ = stream.window(lane, place)
        return int(stream.samples[int(window[int(share * len(window))])])

    def samples_of(self, shard: int) -> range | Int[np.ndarray, " samples"]:
        """All samples of the dataset that a shard is of that take part; they ascend."""
        return self._streams[int(self._part_of[shard])].samples

    def next_use(self, shard: int, step: float, lanes: Sequence[int]) -> float | None:
        """The step, about, in which one of `lanes` reaches a shard again after `step`; None: in this round and the next
        one, none does."""
        part = int(self._part_of[shard])
        stream, pace = self._streams[part], self._step / self._lanes * int(self._places[part]) / self.per_epoch
        places = [place for lane in lanes for place in stream.next_uses(shard, lane, int(step * pace))]
        return min(places) / pace if places else None

    def _found(self, draw: int) -> "tuple[_Stream, int, int]":
        """The stream of a draw, with the lane and the place in it."""
        step, place = divmod(draw, self._step)
        share = self._step // self._lanes
        lane, inside = divmod(place, share)
        place = step * share + inside
        if len(self._streams) == 1:
            return self._streams[0], lane, place
        epoch, inside = divmod(place, self.per_epoch)
        block = inside * self._blocks // self.per_epoch
        while self._before(block + 1).sum() <= inside:
            block += 1
        before = self._before(block)
        part, earlier = self._block(lane, epoch, block)[inside - int(before.sum())].tolist()
        return self._streams[part], lane, epoch * int(self._places[part]) + int(before[part]) + earlier

    def _before(self, block: int) -> Int[np.ndarray, " parts"]:
        """Places of an epoch that each dataset has before a block of it."""
        return block * self._places // self._blocks

    def _mixed(self, lane: int, epoch: int, block: int) -> Int[np.ndarray, "places 2"]:
        """The dataset at each place of a block of the mix, and the places of the block that it has before."""
        counts = self._before(block + 1) - self._before(block)
        parts = np.repeat(np.arange(len(counts)), counts)
        parts = parts[rng.permutation(self._seed, Purpose.MIX_ORDER, (epoch, lane, block), len(parts))]
        earlier = np.empty_like(parts)
        for part, count in enumerate(counts.tolist()):
            earlier[parts == part] = np.arange(count)
        return np.stack([parts, earlier], axis=1)


@dataclass(frozen=True)
class _Members:
    """The samples of a dataset that take part."""

    samples: range | Int[np.ndarray, " samples"]  # in the order of the shards
    numbers: Int[np.ndarray, " shards"]  # of the shards in the dataset, or the mix
    first: Int[np.ndarray, " shards"]  # place in `samples` of each shard's first; no shard is empty
    counts: Int[np.ndarray, " shards"]


class _Round(NamedTuple):
    """The order of the shards in a round of a dataset."""

    shards: Int[np.ndarray, " shards"]
    ranks: Int[np.ndarray, " shards"]  # where each stands in that
    ends: Int[np.ndarray, " shards"]  # samples up to the end of each


class _Stream:
    """One dataset's endless stream of samples, in lanes."""

    def __init__(self, seed: int, part: int, members: _Members, lanes: int, window: int, served: int) -> None:
        self.samples, self._members = members.samples, members
        self._seed, self._part, self._lanes, self._window_shards = seed, part, lanes, window
        # Of each lane the window in use and one that the look-ahead is in, and those that follow them.
        self._window = lru_cache(maxsize=4 * served + 2)(self._shuffled)
        self._round = lru_cache(maxsize=3)(self._shard_order)
        self._cuts = lru_cache(maxsize=4 * served + 2)(self._cut)

    def sample(self, lane: int, place: int) -> int:
        """The sample at a place of a lane."""
        window, inside = self.window(lane, place)
        return int(self.samples[int(window[inside])])

    def window(self, lane: int, place: int) -> tuple[Int[np.ndarray, " samples"], int]:
        """The window that a place of a lane is in, as places in `samples`, and the place in it."""
        size = len(self.samples)
        number = ((place + 1) * self._lanes - 1 - lane) // size
        start, end = self._cuts(number, lane)
        place += start - self._rounds_before(number, lane)
        begin = self._begin(number, start, place)
        return self._window(number, begin, end), place - begin

    def next_uses(self, shard: int, lane: int, place: int) -> Iterator[int]:
        """Places of a lane behind `place` at which windows with the shard begin, in this round and the next one."""
        member = int(self._members.numbers.searchsorted(shard))
        size = len(self.samples)
        this = ((place + 1) * self._lanes - 1 - lane) // size
        for number in (this, this + 1):
            start, end = self._cuts(number, lane)
            last = int(self._round(number).ends[self._round(number).ranks[member]])
            first = max(start, last - int(self._members.counts[member]))
            if first < min(end, last):
                found = self._begin(number, start, first) - start + self._rounds_before(number, lane)
                if found > place:
                    yield found

    def _begin(self, number: int, start: int, place: int) -> int:
        """Where the window of a place of a round begins, in a lane that begins at `start`."""
        ends = self._round(number).ends
        first = int(ends.searchsorted(start, "right"))
        window = (int(ends.searchsorted(place, "right")) - first) // self._window_shards
        return start if window == 0 else int(ends[first + window * self._window_shards - 1])

    def _rounds_before(self, number: int, lane: int) -> int:
        """Samples of a lane in the rounds before `number`; those of all lanes together are all samples of them."""
        return (number * len(self.samples) + lane) // self._lanes

    def _cut(self, number: int, lane: int) -> tuple[int, int]:
        """The samples of a lane in a round, as places in it."""

        def start(lane: int) -> int:
            """Sum of what _rounds_before says of this round's end and beginning, over the lanes before."""
            spans = [divmod(rounds * len(self.samples), self._lanes) for rounds in (number, number + 1)]
            before, after = (lane * whole + max(0, lane + rest - self._lanes) for whole, rest in spans)
            return after - before

        return start(lane), start(lane + 1)

    def _shard_order(self, number: int) -> _Round:
        counts = self._members.counts
        shards = rng.permutation(self._seed, Purpose.SHARD_ORDER, (number, self._part, 0), len(counts))
        ranks = np.empty_like(shards)
        ranks[shards] = np.arange(len(shards))
        return _Round(shards, ranks, np.cumsum(counts[shards]))

    def _shuffled(self, number: int, begin: int, end: int) -> Int[np.ndarray, " samples"]:
        """The window of a round that begins at `begin`, in its order; it reaches no further than `end`."""
        shards, _, ends = self._round(number)
        first = int(ends.searchsorted(begin, "right"))
        chosen = shards[first : first + self._window_shards]
        last = ends[first : first + len(chosen)]
        whole = last - self._members.counts[chosen]  # where they begin, should the first be cut
        shown = np.maximum(whole, begin)
        sizes = np.maximum(np.minimum(last, end) - shown, 0)
        starts = self._members.first[chosen] + shown - whole
        runs: list[list[int]] = []  # neighbouring shards in one: each call for words costs 10 us
        for start, size in sorted(zip(starts.tolist(), sizes.tolist(), strict=True)):
            if runs and runs[-1][1] == start:
                runs[-1][1] += size
            else:
                runs.append([start, start + size])
        numbers = np.concatenate([np.arange(*run) for run in runs])
        place = (number, self._part, 0)
        words = [
            rng.random_words(self._seed, Purpose.SAMPLE_ORDER, place, end - start, first=start) for start, end in runs
        ]
        return numbers[np.argsort(np.concatenate(words), kind="stable")]


def _members(dataset: ShardDataset, config: DataConfig) -> list[_Members]:
    """Those of each dataset of the mix."""
    firsts, counts = dataset.shard_of.first_of_shard, dataset.shard_of.counts
    num_parts = int(dataset.part_of.max()) + 1
    if config.subset is not None and num_parts > 1:
        raise InputError("data.subset does not go with a mix of datasets: give one folder in data.shards")
    if config.subset is not None:
        samples = subset(dataset, range(len(dataset.samples)), config)
        shards, of_each = np.unique(dataset.shard_of[samples], return_counts=True)
        return [_in_shards(samples, shards, of_each)]
    ends = np.searchsorted(dataset.part_of, np.arange(num_parts), side="right").tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [
        _in_shards(
            range(int(firsts[part.start]), int(firsts[part.start] + counts[part].sum())),
            np.arange(part.start, part.stop),
            counts[part],
        )
        for part in parts
    ]


def _in_shards(
    samples: range | Int[np.ndarray, " samples"], shards: Int[np.ndarray, " shards"], counts: Int[np.ndarray, " shards"]
) -> _Members:
    shards, counts = shards[counts > 0], counts[counts > 0]
    return _Members(samples, shards, np.cumsum(counts) - counts, counts)


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples lie far apart


def subset(
    dataset: ShardDataset, samples: range | Int[np.ndarray, " n"], config: DataConfig
) -> range | Int[np.ndarray, " m"]:
    """data.subset of the samples in their order, chosen by content: the same however they were sharded, and nested.

    Raises InputError if there are fewer.
    """
    count = config.subset
    if count is None:
        return samples
    if count > len(samples):
        raise InputError(f"data.subset is {count}, but {dataset.folder} holds only {len(samples)} videos")
    hashes = dataset.column("sha256")[samples].view(">u8").reshape(-1, 4)
    # Those with the smallest hashes; seen from another seed's number, others are.
    hashes = np.column_stack((hashes[:, 0] ^ np.uint64(config.subset_seed * GOLDEN % 2**64), hashes[:, 1:]))
    order = np.lexsort(hashes.T[::-1])
    # Copies of one video are told apart by their keys.
    same = np.flatnonzero((hashes[order] == hashes[order[count - 1]]).all(axis=1))
    order[same] = sorted(order[same].tolist(), key=lambda place: dataset.samples[int(samples[place])].key)
    return np.sort(np.asarray(samples)[order[:count]])

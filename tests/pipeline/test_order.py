"""The order of videos: the stream of runs made before, lanes, mixes in blocks, and how well all of it is shuffled."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.planning import rng, sample_order
from pipeline.planning.rng import Purpose
from pipeline.planning.sample_order import SampleOrder
from pipeline.shards.dataset import ShardOf
from tests.pipeline.test_plan import plan_of, table

STEP = 12


def bare(counts: list[int] | np.ndarray, parts: list[int] | None = None) -> SimpleNamespace:
    """What SampleOrder needs of a dataset: shard s holds counts[s] samples and belongs to dataset parts[s]."""
    ends = np.cumsum(counts)
    part_of = np.array(parts if parts is not None else [0] * len(counts))
    return SimpleNamespace(
        shard_of=ShardOf(ends - counts, int(ends[-1])), part_of=part_of, samples=range(int(ends[-1])), folder=Path("f")
    )


def order_of(dataset: SimpleNamespace, config: DataConfig, seed: int = 0, step: int = STEP) -> SampleOrder:
    return SampleOrder(dataset, config, seed, step=step, served=config.canonical_nodes)


def shown(made: SampleOrder, count: int) -> list[int]:
    return [made.sample(draw) for draw in range(count)]


class Former:
    """The order as it was when every epoch was laid out at its beginning: the definition of today's, in one lane."""

    def __init__(self, dataset: SimpleNamespace, config: DataConfig, seed: int) -> None:
        self._shard_of, self._window, self._seed = np.asarray(dataset.shard_of), config.shuffle_shards, seed
        part_of_sample = dataset.part_of[self._shard_of]
        self._members = [np.flatnonzero(part_of_sample == part) for part in range(int(dataset.part_of.max()) + 1)]
        sizes = np.array([len(part) for part in self._members])
        weights = np.array(config.weights or sizes, dtype=np.float64)
        self._places = np.ceil(sizes.sum() * weights / weights.sum() - 1e-9).astype(np.int64)
        self.per_epoch = int(self._places.sum())
        self._round = lru_cache(self._shuffled)

    def shown(self, count: int) -> list[int]:
        epochs = [self._epoch(number) for number in range(-(-count // self.per_epoch))]
        return np.concatenate(epochs)[:count].tolist()

    def _epoch(self, epoch: int) -> np.ndarray:
        parts = np.repeat(np.arange(len(self._members)), self._places)
        if len(self._members) > 1:
            parts = parts[rng.permutation(self._seed, Purpose.MIX_ORDER, (epoch, 0, 0), self.per_epoch)]
        samples = np.empty(self.per_epoch, dtype=np.int64)
        for part, places in enumerate(self._places.tolist()):
            samples[parts == part] = self._stream(part, epoch * places, (epoch + 1) * places)
        return samples

    def _stream(self, part: int, first: int, end: int) -> np.ndarray:
        size = len(self._members[part])
        rounds = range(first // size, (end - 1) // size + 1)
        return np.concatenate([self._round(part, n) for n in rounds])[first - rounds[0] * size :][: end - first]

    def _shuffled(self, part: int, number: int) -> np.ndarray:
        members = self._members[part]
        shards, shard_of = np.unique(self._shard_of[members], return_inverse=True)
        turn = np.empty(len(shards), dtype=np.int64)
        turn[rng.permutation(self._seed, Purpose.SHARD_ORDER, (number, part, 0), len(shards))] = np.arange(len(shards))
        window = turn[shard_of] // self._window
        words = rng.random_words(self._seed, Purpose.SAMPLE_ORDER, (number, part, 0), len(members))
        return members[np.lexsort((words, window))]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 2**64 - 1),
    window=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_in_one_lane_the_stream_is_that_of_runs_made_before(counts: list[int], seed: int, window: int) -> None:
    dataset, config = bare(np.array(counts)), DataConfig(shuffle_shards=window)
    count = 3 * sum(counts) + 5
    expected = Former(dataset, config, seed).shown(count)
    assert shown(order_of(dataset, config, seed), count) == expected


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=4), data=st.data(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_mix_of_before_goes_on_as_it_was(sizes: list[list[int]], data: st.DataObject, seed: int) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(sizes), max_size=len(sizes)) | st.none())
    parts = [part for part, counts in enumerate(sizes) for _ in counts]
    dataset = bare(np.concatenate(sizes), parts)
    config = DataConfig(shards=[str(part) for part in range(len(sizes))], weights=weights, shuffle_shards=2)
    former = Former(dataset, config, seed)
    count = 2 * former.per_epoch + 7
    assert shown(order_of(dataset, config, seed), count) == former.shown(count), "it is not larger than a block"


def test_a_subset_is_in_the_order_of_before() -> None:
    dataset, config = table([5, 0, 7, 3, 9]), DataConfig(frame_stride=1, subset=11, shuffle_shards=2)
    plan = plan_of(dataset, config)
    chosen = sorted({plan.row(position).sample for position in range(11)})
    assert len(chosen) == 11
    per_shard = np.bincount(dataset.shard_of[chosen], minlength=5)
    alone = Former(bare(per_shard[per_shard > 0]), config, seed=0).shown(33)
    assert [plan.row(position).sample for position in range(33)] == [chosen[place] for place in alone]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 10**6),
    lanes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    window=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_lanes_of_a_round_show_every_video_once(counts: list[int], seed: int, lanes: int, window: int) -> None:
    size = sum(counts)
    made = order_of(bare(np.array(counts)), DataConfig(canonical_nodes=lanes, shuffle_shards=window), seed)
    steps = -(-3 * size // STEP) + 2
    in_lanes = np.array(shown(made, steps * STEP)).reshape(steps, lanes, -1).swapaxes(0, 1).reshape(lanes, -1)
    for number in range(3):
        ends = [[((number + more) * size + lane) // lanes for more in (0, 1)] for lane in range(lanes)]
        videos = [v for lane, (start, end) in enumerate(ends) for v in in_lanes[lane, start:end].tolist()]
        assert sorted(videos) == list(range(size))
        assert max(end - start for start, end in ends) - min(end - start for start, end in ends) <= 1


def test_each_lane_reads_shards_of_its_own() -> None:
    dataset, config = bare(np.full(120, 20)), DataConfig(canonical_nodes=12, shuffle_shards=4)
    made = order_of(dataset, config)
    shards = np.array([int(dataset.shard_of[sample]) for sample in shown(made, 2400)]).reshape(-1, 12)
    per_lane = [Counter(lane.tolist()) for lane in shards.T]
    assert [len(lane) for lane in per_lane] == [10] * 12
    assert all(len(set(shards[row : row + 80].T[0])) == 4 for row in (0, 80)), "a window at a time"
    uneven = bare(np.array([7, 30, 20, 11, 25, 27] * 20))
    stream = shown(order_of(uneven, config), 2400)
    shards = np.array([int(uneven.shard_of[sample]) for sample in stream]).reshape(-1, 12)
    assert sum(len(set(lane.tolist())) for lane in shards.T) <= 120 + 11, "at the cuts alone, two share one"


def test_lanes_do_not_depend_on_the_number_of_processes() -> None:
    dataset, config = (
        table([5, 3, 8, 6, 1, 9]),
        DataConfig(frame_stride=1, canonical_nodes=4, shuffle_shards=2, repeats=2),
    )
    alone = [row for index in range(9) for row in plan_of(dataset, config, batch_size=24).batch(index)]
    for world in (2, 3, 4):
        shape = {"batch_size": 6, "global_batch": 24, "world_size": world}
        ranks = [plan_of(dataset, config, rank=rank, **shape) for rank in range(world)]
        rows = [row for plan in ranks for index in range(9 * plan.passes) for row in plan.batch(index)]
        assert sorted(rows, key=lambda row: row.position) == alone


def test_lanes_that_do_not_divide_the_step_are_refused() -> None:
    with pytest.raises(InputError, match=r"data\.canonical_nodes is 5, and a step decodes 4 videos: give a divisor"):
        plan_of(table([9]), DataConfig(frame_stride=1, canonical_nodes=5, repeats=2), batch_size=8)
    with pytest.raises(InputError, match=r"data\.canonical_nodes is 0: must be at least 1"):
        DataConfig(canonical_nodes=0)


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_mix_keeps_its_shares_in_every_block_and_its_rounds_complete(lanes: int, monkeypatch) -> None:
    monkeypatch.setattr(sample_order, "MIX_BLOCK", 20)
    dataset = bare(np.array([50, 40, 30, 7]), [0, 0, 0, 1])
    config = DataConfig(shards=["a", "b"], weights=[3.0, 1.0], canonical_nodes=lanes, shuffle_shards=2)
    made = order_of(dataset, config)
    assert made.per_epoch == 96 + 32
    stream = np.array(shown(made, STEP * 128)).reshape(128, lanes, -1).swapaxes(0, 1).reshape(lanes, -1)
    small = stream >= 120
    shares = small[:, : small.shape[1] // 20 * 20].reshape(lanes, -1, 20).sum(axis=2)
    assert shares.min() >= 3
    assert shares.max() <= 7
    if lanes == 1:
        videos = stream[small]
        assert all(sorted(videos[start : start + 7]) == list(range(120, 127)) for start in range(0, 350, 7))
        videos = stream[~small]
        assert all(sorted(videos[start : start + 120]) == list(range(120)) for start in range(0, 960, 120))
    assert len(Counter(stream[small].tolist())) == 7


def test_a_hundred_million_clips_are_not_laid_out() -> None:
    """Neither of one dataset nor of a mix of three, in 64 lanes; memory is that of the table of shards."""
    counts = np.full(100_000, 1000)
    for parts in ([0] * 100_000, np.repeat([0, 1, 2], [20_000, 30_000, 50_000])):
        dataset = bare(counts, parts)
        config = DataConfig(canonical_nodes=64, shards=["a", "b", "c"])
        tracemalloc.start()
        made = SampleOrder(dataset, config, 0, step=4096, served=1)
        # The first step, one in the middle, and over the turn of an epoch: what one of 64 processes asks for.
        seen = [made.sample(step * 4096 + place) for step in (0, 12_000, 24_413, 24_415) for place in range(64)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(set(seen)) > 250
        assert peak < 24 * 2**20


def test_neighbours_come_from_one_shard_no_more_often_than_in_a_full_shuffle_of_the_window() -> None:
    """And the places of a shard's videos in its window are even: chi-square, 10 places, 9 degrees of freedom each."""
    dataset = bare(np.full(96, 50))
    for lanes in (1, 4):
        config = replace(DataConfig(), canonical_nodes=lanes, shuffle_shards=8)
        shards = np.array([int(dataset.shard_of[sample]) for sample in shown(order_of(dataset, config), 4800)])
        in_lanes = shards.reshape(-1, lanes, STEP // lanes).swapaxes(0, 1).reshape(lanes, -1)
        same = (in_lanes[:, 1:] == in_lanes[:, :-1]).mean()
        assert same == pytest.approx(49 / 399, abs=3 * (49 / 399 / 4800) ** 0.5)
        windows = in_lanes.reshape(-1, 10, 40)
        counts = np.array([[np.bincount(part, minlength=96) for part in window] for window in windows])
        present = counts.sum(axis=1) > 0
        assert (present.sum(axis=1) == 8).all(), "eight shards a window"
        of_shard = counts.swapaxes(1, 2)[present]
        chi_square = ((of_shard - 5) ** 2 / 5).sum() / of_shard.shape[0]
        assert 6.5 < chi_square < 9.5, "9 degrees of freedom, less what a window without replacement takes: 7.9"


@pytest.mark.parametrize(
    ("parts", "lanes"), [([0] * 24, 1), ([0] * 24, 4), ([0] * 16 + [1] * 8, 1), ([0] * 16 + [1] * 8, 3)]
)
def test_it_is_known_when_a_shard_is_read_again(parts: list[int], lanes: int) -> None:
    """By a lane that is asked about; of one dataset to the step in which its window begins, of a mix about."""
    rng = np.random.default_rng(lanes)
    dataset = bare(rng.integers(5, 12, 24), parts)
    made = order_of(dataset, DataConfig(shards=["a", "b"][: max(parts) + 1], canonical_nodes=lanes, shuffle_shards=2))
    share, steps = STEP // lanes, 60
    shard_of = np.array([int(dataset.shard_of[made.sample(draw)]) for draw in range(steps * STEP)])
    read = shard_of.reshape(steps, lanes, share)
    window = 2 * 12 / share * (max(parts) + 1)
    for lane in range(lanes):
        for step in (0, 7, 15):
            for shard in range(24):
                found = made.next_use(shard, step, [lane])
                uses = np.flatnonzero((read[:, lane] == shard).any(axis=1))
                if found is not None and found < steps - window:
                    later = uses[uses > step]
                    assert len(later)
                    assert np.abs(later - found).min() <= window + 1, "it is read when that was said"
                if found is not None and not (np.abs(uses - step) <= window).any():
                    assert not ((uses > step) & (uses < found - (window if max(parts) else 2))).any(), "not before"


def test_a_bad_video_is_replaced_out_of_its_own_window() -> None:
    """By a pure function of the place, in shards that its lane reads just then; where too many fail, by any other."""
    dataset = bare(np.full(60, 5))
    config = DataConfig(canonical_nodes=3, shuffle_shards=2)
    made = order_of(dataset, config)
    shards = np.array([int(dataset.shard_of[made.sample(draw)]) for draw in range(240)]).reshape(20, 3, 4)
    for draw in range(40, 160):
        step, lane = draw // STEP, draw % STEP // 4
        near = set(shards[max(0, step - 3) : step + 4, lane].ravel().tolist())
        others = [made.other(draw, share, 1) for share in (0.0, 0.3, 0.999)]
        assert {int(dataset.shard_of[other]) for other in others} <= near
        assert len(set(others)) == 3
        assert others[1] == order_of(dataset, config).other(draw, 0.3, 8)
        assert made.other(draw, 0.3, sample_order.NEARBY + 1) == 90
    mix = bare(np.full(8, 5), [0] * 4 + [1] * 4)
    made = order_of(mix, DataConfig(shards=["a", "b"], shuffle_shards=1))
    for draw in range(80):
        assert (made.other(draw, 0.5, 1) < 20) == (made.sample(draw) < 20)
        assert dataset.shard_of[made.other(draw, 0.5, 1)] == dataset.shard_of[made.sample(draw)]


def test_an_order_is_that_of_the_words_and_equal_ones_keep_theirs(monkeypatch) -> None:
    """Runs that began when NumPy sorted them go on in the same order."""
    place = (1, 0, 0)
    for count in (1, 2, 5, 4096, 100_003):
        words = rng.random_words(7, Purpose.SHARD_ORDER, place, count)
        assert (rng.permutation(7, Purpose.SHARD_ORDER, place, count) == np.argsort(words, kind="stable")).all()
    words = np.array([2**63, 5, 2**64 - 1, 0, 2**63 - 1, 5, 2**63, 0], np.uint64)
    monkeypatch.setattr(rng, "random_words", lambda *_: words)
    assert rng.permutation(7, Purpose.SHARD_ORDER, place, 8).tolist() == [3, 7, 1, 5, 4, 0, 6, 2]

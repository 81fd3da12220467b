"""The order of videos: epochs, canonical nodes, mixes in blocks, and how well all of it is shuffled."""

import doctest
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import make_plan, make_table

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning import rng, sample_order
from adamae.pipeline.planning.rng import Purpose
from adamae.pipeline.planning.sample_order import SampleOrder
from adamae.pipeline.shards.dataset import ShardDataset

STEP = 12


def make_dataset(
    counts: list[int] | np.ndarray, parts: list[int] | np.ndarray | None = None
) -> SimpleNamespace:
    """What SampleOrder needs of a dataset: shard s holds counts[s] samples and belongs to dataset parts[s]."""
    of_part = np.array(parts if parts is not None else [0] * len(counts))
    return SimpleNamespace(
        shard_of=lambda samples: np.searchsorted(np.cumsum(counts), samples, side="right"),
        samples=range(sum(counts)),
        folder=Path("f"),
        parts=[
            SimpleNamespace(counts=np.array(counts)[of_part == part])
            for part in range(max(of_part) + 1)
        ],
    )


def make_order(dataset: SimpleNamespace, config: DataConfig, seed: int = 0) -> SampleOrder:
    return SampleOrder(dataset, config, seed, STEP, config.canonical_nodes)  # type: ignore[arg-type]


def list_samples(order: SampleOrder, count: int) -> list[int]:
    return [order.sample(draw) for draw in range(count)]


def by_node(draws: list[int], nodes: int) -> np.ndarray:
    """Samples of whole steps [nodes, places]."""
    return np.array(draws).reshape(-1, nodes, STEP // nodes).swapaxes(0, 1).reshape(nodes, -1)


def lay_out_epoch(counts: np.ndarray, seed: int, shuffle_shards: int, epoch: int) -> list[int]:
    """Lay out an epoch of one dataset and one node at once: the definition in sample_order.py."""
    counts = counts[counts > 0]
    turns = np.argsort(rng.permutation(seed, Purpose.SHARD_ORDER, (epoch, 0, 0), len(counts)))
    windows = np.repeat(turns // shuffle_shards, counts)
    words = rng.random_words(seed, Purpose.SAMPLE_ORDER, (epoch, 0, 0), int(counts.sum()))
    return np.lexsort((words, windows)).tolist()


def test_the_example_in_the_docstring_is_right() -> None:
    dataset = make_table([3, 2, 4, 2, 1])
    names = {**vars(sample_order), "dataset": dataset}
    (example,) = doctest.DocTestFinder(recurse=False).find(SampleOrder, globs=names)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted == 3
    assert result.failed == 0
    config = DataConfig(canonical_nodes=2, shuffle_shards=2)
    order = SampleOrder(dataset, config, seed=0, step_size=4, num_served=2)
    nodes = order._datasets[0]
    assert nodes._spans.tolist() == [[11, 1], [9, 2], [5, 4], [3, 2], [0, 3]]
    assert nodes._cut_spans(node=0).tolist() == [[5, 3], [9, 2], [11, 1]]
    assert nodes._cut_spans(node=1).tolist() == [[0, 3], [3, 2], [8, 1]]
    windows = [
        nodes._shuffle_window(node, 0, window).tolist() for node in (0, 1) for window in (0, 1)
    ]
    assert windows == [[10, 9, 11], [6, 7, 5], [2, 1, 3, 0, 4], [8]]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 2**64 - 1),
    window=st.integers(1, 5),
)
@settings(max_examples=50)
def test_order_equals_its_definition(counts: list[int], seed: int, window: int) -> None:
    expected = [
        s for epoch in range(3) for s in lay_out_epoch(np.array(counts), seed, window, epoch)
    ]
    order = make_order(make_dataset(counts), DataConfig(shuffle_shards=window), seed)
    assert list_samples(order, len(expected)) == expected


def test_subset_keeps_the_order_of_its_shards() -> None:
    dataset, config = (
        make_table([5, 0, 7, 3, 9]),
        DataConfig(frame_stride=1, subset=11, shuffle_shards=2),
    )
    samples = [make_plan(dataset, config).row(position).sample for position in range(33)]
    chosen = sorted(set(samples))
    assert len(chosen) == 11
    counts = np.bincount(dataset.shard_of(chosen), minlength=5)
    assert samples == [
        chosen[place] for epoch in range(3) for place in lay_out_epoch(counts, 0, 2, epoch)
    ]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(
        lambda counts: sum(counts) >= STEP
    ),
    seed=st.integers(0, 10**6),
    nodes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    window=st.integers(1, 4),
)
@settings(max_examples=50)
def test_canonical_nodes_are_disjoint_and_complete(
    counts: list[int], seed: int, nodes: int, window: int
) -> None:
    """Each node repeats its own samples, whole each time; together they are the dataset."""
    size = sum(counts)
    order = make_order(
        make_dataset(counts), DataConfig(canonical_nodes=nodes, shuffle_shards=window), seed
    )
    streams = by_node(list_samples(order, STEP * (3 * size // STEP + 3)), nodes)
    own = []
    for node, stream in enumerate(streams.tolist()):
        count = (node + 1) * size // nodes - node * size // nodes
        epochs = [sorted(stream[start : start + count]) for start in range(0, 2 * count, count)]
        assert epochs[0] == epochs[1] == sorted(set(stream))
        own += epochs[0]
    assert sorted(own) == list(range(size))


def test_nodes_read_the_same_shards_in_every_epoch() -> None:
    dataset, config = (
        make_dataset(np.full(120, 20)),
        DataConfig(canonical_nodes=12, shuffle_shards=4),
    )
    order = make_order(dataset, config)
    shards = by_node([int(dataset.shard_of(sample)) for sample in list_samples(order, 4800)], 12)
    assert [len(set(node)) for node in shards.tolist()] == [10] * 12
    assert not np.array_equal(shards[:, :200], shards[:, 200:]), "in another order"
    assert all(len(set(shards[0, start : start + 80].tolist())) == 4 for start in (0, 80)), (
        "a window at a time"
    )
    uneven = make_dataset(np.array([7, 30, 20, 11, 25, 27] * 20))
    samples = list_samples(make_order(uneven, config), 2400)
    read = [
        {int(uneven.shard_of(sample)) for sample in node} for node in by_node(samples, 12).tolist()
    ]
    assert sum(map(len, read)) <= 120 + 11, "only at the cuts, two nodes share one"


def test_canonical_nodes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"data\.canonical_nodes is 5, but a step decodes 4 videos"
    ):
        make_plan(
            make_table([9]), DataConfig(frame_stride=1, canonical_nodes=5, repeats=2), batch_size=8
        )
    with pytest.raises(
        InputError, match=r"data\.canonical_nodes is 4, but a dataset has only 3 videos"
    ):
        make_plan(make_table([3]), DataConfig(frame_stride=1, canonical_nodes=4))


@pytest.mark.parametrize("nodes", [1, 3])
def test_mix_keeps_its_weights_in_every_block(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "MIX_BLOCK", 20)
    dataset = make_dataset([50, 40, 30, 7], [0, 0, 0, 1])
    by_size = make_order(dataset, DataConfig(shards=["a", "b"], canonical_nodes=nodes))
    assert sorted(list_samples(by_size, 127)) == list(range(127)) or nodes > 1
    config = DataConfig(
        shards=["a", "b"], weights=[3.0, 1.0], canonical_nodes=nodes, shuffle_shards=2
    )
    order = make_order(dataset, config)
    assert order.epoch_size == 96 + 32
    streams = by_node(list_samples(order, STEP * 128), nodes)
    small = streams >= 120
    per_block = small[:, : small.shape[1] // 20 * 20].reshape(nodes, -1, 20).sum(axis=2)
    assert per_block.min() >= 3
    assert per_block.max() <= 7
    if nodes == 1:
        for videos, size in ((streams[small], 7), (streams[~small], 120)):
            for start in range(0, len(videos) - size + 1, size):
                assert len(set(videos[start : start + size].tolist())) == size, (
                    "each dataset is repeated whole"
                )
    assert len(Counter(streams[small].tolist())) == 7


def test_hundred_million_clips_are_not_laid_out() -> None:
    """Neither of one dataset nor of a mix of three, with 64 nodes; memory is that of the table of shards."""
    counts = np.full(100_000, 1000)
    for parts in ([0] * 100_000, np.repeat([0, 1, 2], [20_000, 30_000, 50_000])):
        dataset = make_dataset(counts, parts)
        config = DataConfig(canonical_nodes=64, shards=["a", "b", "c"])
        tracemalloc.start()
        order = SampleOrder(dataset, config, 0, 4096, 1)  # type: ignore[arg-type]
        # The first step, one in the middle, and over the turn of an epoch: what one of 64 processes asks for.
        seen = [
            order.sample(step * 4096 + place)
            for step in (0, 12_000, 24_413, 24_415)
            for place in range(64)
        ]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(set(seen)) > 250
        assert peak < 24 * 2**20


def test_windows_are_shuffled_evenly() -> None:
    """Neighbors come from one shard as often as in a full shuffle of the window, and the places of a shard's videos in
    its window are even: chi-square, 10 places, 9 degrees of freedom each."""
    dataset = make_dataset(np.full(96, 50))
    for nodes in (1, 4):
        order = make_order(dataset, DataConfig(canonical_nodes=nodes, shuffle_shards=8))
        shards = by_node(
            [int(dataset.shard_of(sample)) for sample in list_samples(order, 4800)], nodes
        )
        same = (shards[:, 1:] == shards[:, :-1]).mean()
        assert same == pytest.approx(49 / 399, abs=3 * (49 / 399 / 4800) ** 0.5)
        windows = shards.reshape(-1, 10, 40)
        counts = np.array(
            [[np.bincount(part, minlength=96) for part in window] for window in windows]
        )
        present = counts.sum(axis=1) > 0
        assert (present.sum(axis=1) == 8).all(), "eight shards a window"
        of_shard = counts.swapaxes(1, 2)[present]
        chi_square = ((of_shard - 5) ** 2 / 5).sum() / of_shard.shape[0]
        assert 6.5 < chi_square < 9.5, (
            "9 degrees of freedom, less what a window without replacement takes: 7.9"
        )


def test_bad_videos_are_replaced_from_their_own_window() -> None:
    dataset = make_dataset(np.full(60, 5))
    config = DataConfig(canonical_nodes=3, shuffle_shards=2)
    order = make_order(dataset, config)
    shards = np.array(
        [int(dataset.shard_of(sample)) for sample in list_samples(order, 240)]
    ).reshape(20, 3, 4)
    for draw in range(40, 160):
        step, node = draw // STEP, draw % STEP // 4
        near = set(shards[max(0, step - 3) : step + 4, node].ravel().tolist())
        others = [order.replacement(draw, fraction, 1) for fraction in (0.0, 0.3, 0.999)]
        assert {int(dataset.shard_of(other)) for other in others} <= near
        assert len(set(others)) == 3
        assert others[1] == make_order(dataset, config).replacement(draw, 0.3, 8)
        assert order.replacement(draw, 0.3, sample_order.NEARBY_ATTEMPTS + 1) == 90, (
            "then, any of the dataset"
        )
    mix = make_order(
        make_dataset([5] * 8, [0] * 4 + [1] * 4), DataConfig(shards=["a", "b"], shuffle_shards=1)
    )
    assert all(
        (mix.replacement(draw, 0.5, 1) < 20) == (mix.sample(draw) < 20) for draw in range(80)
    )


def make_long_tail() -> tuple[ShardDataset, np.ndarray]:
    """Classes of 3,000, 300 and 30 videos in random order, in 37 shards, and their labels."""
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [3000, 300, 30]))
    return make_table([90] * 37, labels=labels.tolist()), labels


@pytest.mark.parametrize(
    ("balance", "expected"), [(1.0, [1 / 3] * 3), (0.5, [0.706, 0.223, 0.071])]
)
@pytest.mark.parametrize("nodes", [1, 4])
def test_classes_are_balanced(balance: float, expected: list[float], nodes: int) -> None:
    """In every epoch, which reads what it reads without; rare videos are repeated, few of the frequent ones twice."""
    dataset, labels = make_long_tail()
    config = DataConfig(class_balance=balance, canonical_nodes=nodes, shuffle_shards=9)
    order = make_order(dataset, config)  # type: ignore[arg-type]
    for epoch in range(2):
        samples = np.array([order.sample(draw) for draw in range(epoch * 3330, (epoch + 1) * 3330)])
        shares = np.bincount(labels[samples], minlength=3) / 3330
        np.testing.assert_allclose(shares, expected, rtol=0.2)
        repeats = np.bincount(samples, minlength=3330)
        assert repeats[labels == 2].min() >= 1
        assert repeats[labels == 0].max() <= (
            1 if nodes == 1 else 2
        )  # epochs of nodes end at other places
        again = (samples[1:] == samples[:-1]).mean()
        assert again < 0.02, "repeats are spread"
    replaced = [
        order.replacement(draw, fraction, 1)
        for draw in range(40)
        for fraction in np.arange(0, 1, 0.05)
    ]
    assert np.bincount(labels[replaced])[2] > 400 * expected[2]


def test_a_subset_is_balanced_by_its_own_classes() -> None:
    dataset, labels = make_long_tail()
    order = make_order(dataset, DataConfig(class_balance=1.0, subset=600))  # type: ignore[arg-type]
    shares = np.bincount(labels[list_samples(order, 6000)], minlength=3) / 6000
    np.testing.assert_allclose(shares, [1 / 3] * 3, rtol=0.25)
    dataset.info.report["class_histogram"] = {
        "class 1": 300,
        "class 0": 3000,
        "class 2": 30,
    }  # as make_shards counts
    counted = make_order(make_long_tail()[0], DataConfig(class_balance=1.0))  # type: ignore[arg-type]
    known = make_order(dataset, DataConfig(class_balance=1.0))  # type: ignore[arg-type]
    assert list_samples(known, 500) == list_samples(counted, 500)
    with pytest.raises(InputError, match=r"data\.class_balance is 1, but made has no labels"):
        make_plan(make_table([9]), DataConfig(class_balance=1.0))

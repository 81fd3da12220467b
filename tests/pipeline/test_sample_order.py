"""The order of samples: epochs, canonical nodes, mixes, and how well all of it is shuffled."""

import doctest
import tracemalloc
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

# Decodes of a step.
STEP = 12


def make_dataset(
    counts: list[int] | np.ndarray, parts: list[int] | np.ndarray | None = None
) -> SimpleNamespace:
    """Return what SampleOrder needs of a dataset.

    Shard s holds counts[s] samples and belongs to dataset parts[s] of the mix, by default to one.
    """
    counts = np.array(counts)
    if parts is None:
        parts = np.zeros(len(counts), int)
    part_of_shard = np.array(parts)
    ends = np.cumsum(counts)
    return SimpleNamespace(
        shard_of=lambda samples: np.searchsorted(ends, samples, side="right"),
        samples=range(counts.sum()),
        folder=Path("f"),
        parts=[
            SimpleNamespace(counts=counts[part_of_shard == part])
            for part in range(part_of_shard.max() + 1)
        ],
    )


def make_order(
    dataset: SimpleNamespace | ShardDataset, config: DataConfig, seed: int = 0
) -> SampleOrder:
    return SampleOrder(dataset, config, seed, STEP, config.canonical_nodes)  # type: ignore[arg-type]


def list_samples(order: SampleOrder, count: int) -> list[int]:
    return [order.sample(position) for position in range(count)]


def list_shards(dataset: SimpleNamespace, order: SampleOrder, count: int) -> list[int]:
    return [int(dataset.shard_of(sample)) for sample in list_samples(order, count)]


def by_node(stream: list[int], nodes: int) -> np.ndarray:
    """Divide a stream of whole steps into those of the nodes [nodes, positions]."""
    steps = np.array(stream).reshape(-1, nodes, STEP // nodes)
    return steps.swapaxes(0, 1).reshape(nodes, -1)


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
    order = SampleOrder(dataset, config, seed=9, step_size=4, num_cached_nodes=2)
    nodes = order._datasets[0]
    assert nodes._spans.tolist() == [[11, 1], [3, 2], [5, 4], [0, 3], [9, 2]]
    assert nodes._cut_spans(node=0).tolist() == [[3, 2], [5, 3], [11, 1]]
    assert nodes._cut_spans(node=1).tolist() == [[0, 3], [8, 1], [9, 2]]
    windows = [
        nodes._shuffle_window(node, 0, window).tolist() for node in (0, 1) for window in (0, 1)
    ]
    assert windows == [[4, 11, 3], [5, 7, 6], [8, 10, 9], [1, 0, 2]]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 2**64 - 1),
    window=st.integers(1, 5),
)
@settings(max_examples=50)
def test_order_equals_its_definition(counts: list[int], seed: int, window: int) -> None:
    expected: list[int] = []
    for epoch in range(3):
        expected += lay_out_epoch(np.array(counts), seed, window, epoch)
    order = make_order(make_dataset(counts), DataConfig(shuffle_shards=window), seed)
    assert list_samples(order, len(expected)) == expected


def test_subset_keeps_the_order_of_its_shards() -> None:
    dataset = make_table([5, 0, 7, 3, 9])
    plan = make_plan(dataset, DataConfig(frame_stride=1, subset=11, shuffle_shards=2))
    samples = [plan.row(position).sample for position in range(33)]
    subset = sorted(set(samples))
    assert len(subset) == 11
    counts = np.bincount(dataset.shard_of(subset), minlength=5)
    expected: list[int] = []
    for epoch in range(3):
        expected += [subset[index] for index in lay_out_epoch(counts, 0, 2, epoch)]
    assert samples == expected


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
    config = DataConfig(canonical_nodes=nodes, shuffle_shards=window)
    order = make_order(make_dataset(counts), config, seed)
    num_steps = 3 * size // STEP + 3
    streams = by_node(list_samples(order, STEP * num_steps), nodes)
    samples_of_nodes = []
    for node, stream in enumerate(streams.tolist()):
        count = (node + 1) * size // nodes - node * size // nodes
        first_epoch = sorted(stream[:count])
        second_epoch = sorted(stream[count : 2 * count])
        assert first_epoch == second_epoch == sorted(set(stream))
        samples_of_nodes += first_epoch
    assert sorted(samples_of_nodes) == list(range(size))


def test_nodes_read_the_same_shards_in_every_epoch() -> None:
    dataset = make_dataset(np.full(120, 20))
    config = DataConfig(canonical_nodes=12, shuffle_shards=4)
    shards = by_node(list_shards(dataset, make_order(dataset, config), 4800), 12)
    assert [len(set(stream)) for stream in shards.tolist()] == [10] * 12
    assert not np.array_equal(shards[:, :200], shards[:, 200:]), "in another order"
    for start in (0, 80):
        window = shards[0, start : start + 80]
        assert len(set(window.tolist())) == 4, "a window at a time"


def test_nodes_share_shards_only_where_their_samples_meet() -> None:
    dataset = make_dataset(np.array([7, 30, 20, 11, 25, 27] * 20))
    order = make_order(dataset, DataConfig(canonical_nodes=12, shuffle_shards=4))
    shards = by_node(list_shards(dataset, order, 2400), 12)
    num_shards = [len(set(stream)) for stream in shards.tolist()]
    assert sum(num_shards) <= 120 + 11


def test_canonical_nodes_that_do_not_fit_are_refused() -> None:
    says = r"data\.canonical_nodes is 5, but a step decodes 4 videos"
    config = DataConfig(frame_stride=1, canonical_nodes=5, repeats=2)
    with pytest.raises(InputError, match=says):
        make_plan(make_table([9]), config, batch_size=8)
    says = r"data\.canonical_nodes is 4, but a dataset has only 3 videos"
    with pytest.raises(InputError, match=says):
        make_plan(make_table([3]), DataConfig(frame_stride=1, canonical_nodes=4))


def test_a_mix_without_weights_is_one_epoch_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "MIX_BLOCK", 20)
    dataset = make_dataset([50, 40, 30, 7], [0, 0, 0, 1])
    order = make_order(dataset, DataConfig(shards=["a", "b"]))
    assert sorted(list_samples(order, 127)) == list(range(127))


@pytest.mark.parametrize("nodes", [1, 3])
def test_mix_keeps_its_weights_in_every_block(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "MIX_BLOCK", 20)
    dataset = make_dataset([50, 40, 30, 7], [0, 0, 0, 1])
    config = DataConfig(
        shards=["a", "b"], weights=[3.0, 1.0], canonical_nodes=nodes, shuffle_shards=2
    )
    order = make_order(dataset, config)
    assert order.epoch_size == 96 + 32
    streams = by_node(list_samples(order, STEP * 128), nodes)
    is_small = streams >= 120
    num_blocks = is_small.shape[1] // 20
    per_block = is_small[:, : num_blocks * 20].reshape(nodes, num_blocks, 20).sum(axis=2)
    assert per_block.min() >= 3
    assert per_block.max() <= 7
    assert len(set(streams[is_small].tolist())) == 7


def test_each_dataset_of_a_mix_is_repeated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "MIX_BLOCK", 20)
    dataset = make_dataset([50, 40, 30, 7], [0, 0, 0, 1])
    config = DataConfig(shards=["a", "b"], weights=[3.0, 1.0], shuffle_shards=2)
    stream = np.array(list_samples(make_order(dataset, config), STEP * 128))
    for samples, size in ((stream[stream < 120], 120), (stream[stream >= 120], 7)):
        for start in range(0, len(samples) - size + 1, size):
            assert len(set(samples[start : start + size].tolist())) == size


@pytest.mark.parametrize(
    "parts", [[0] * 100_000, np.repeat([0, 1, 2], [20_000, 30_000, 50_000])], ids=["one", "mix"]
)
def test_hundred_million_clips_are_not_laid_out(parts: list[int] | np.ndarray) -> None:
    """With 64 nodes; memory is that of the table of shards."""
    dataset = make_dataset(np.full(100_000, 1000), parts)
    config = DataConfig(canonical_nodes=64, shards=["a", "b", "c"])
    tracemalloc.start()
    order = SampleOrder(dataset, config, 0, 4096, 1)  # type: ignore[arg-type]
    samples: set[int] = set()
    # The first step, one in the middle, and over the turn of an epoch.
    for step in (0, 12_000, 24_413, 24_415):
        # The positions that one of 64 processes asks for.
        samples.update(order.sample(step * 4096 + index) for index in range(64))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) > 250
    assert peak_bytes < 24 * 2**20


@pytest.mark.parametrize("nodes", [1, 4])
def test_windows_are_shuffled_evenly(nodes: int) -> None:
    """Neighbors come from one shard as often as in a full shuffle of the window.

    The positions of a shard's videos in its window are even: chi-square of 10 parts of the window,
    with 9 degrees of freedom each.
    """
    dataset = make_dataset(np.full(96, 50))
    order = make_order(dataset, DataConfig(canonical_nodes=nodes, shuffle_shards=8))
    shards = by_node(list_shards(dataset, order, 4800), nodes)
    same = (shards[:, 1:] == shards[:, :-1]).mean()
    # 49 of the other 399 videos of a window are of the same shard.
    expected = 49 / 399
    assert same == pytest.approx(expected, abs=3 * (expected / 4800) ** 0.5)
    windows = shards.reshape(-1, 10, 40)
    counts = np.array([[np.bincount(part, minlength=96) for part in window] for window in windows])
    is_present = counts.sum(axis=1) > 0
    assert (is_present.sum(axis=1) == 8).all(), "eight shards a window"
    counts_of_shards = counts.swapaxes(1, 2)[is_present]
    chi_square = ((counts_of_shards - 5) ** 2 / 5).sum() / len(counts_of_shards)
    # 9, less what a window without replacement takes: 7.9.
    assert 6.5 < chi_square < 9.5


def test_bad_videos_are_replaced_from_their_own_window() -> None:
    dataset = make_dataset(np.full(60, 5))
    config = DataConfig(canonical_nodes=3, shuffle_shards=2)
    order = make_order(dataset, config)
    shards = np.array(list_shards(dataset, order, 240)).reshape(20, 3, 4)
    for position in range(40, 160):
        step, index = divmod(position, STEP)
        node = index // 4
        nearby = set(shards[max(0, step - 3) : step + 4, node].ravel().tolist())
        samples = [order.replacement(position, fraction, 1) for fraction in (0.0, 0.3, 0.999)]
        assert {int(dataset.shard_of(sample)) for sample in samples} <= nearby
        assert len(set(samples)) == 3
        assert samples[1] == make_order(dataset, config).replacement(position, 0.3, 8)
        last_attempt = sample_order.NEARBY_ATTEMPTS + 1
        assert order.replacement(position, 0.3, last_attempt) == 90, "then, any of the dataset"


def test_bad_videos_of_a_mix_are_replaced_from_their_own_dataset() -> None:
    dataset = make_dataset([5] * 8, [0] * 4 + [1] * 4)
    order = make_order(dataset, DataConfig(shards=["a", "b"], shuffle_shards=1))
    for position in range(80):
        is_of_first = order.sample(position) < 20
        assert (order.replacement(position, 0.5, 1) < 20) == is_of_first


def make_long_tail() -> tuple[ShardDataset, np.ndarray]:
    """Return a dataset of 37 shards and its labels: 3,000, 300 and 30 videos, in random order."""
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [3000, 300, 30]))
    return make_table([90] * 37, labels=labels.tolist()), labels


@pytest.mark.parametrize(
    ("balance", "expected"), [(1.0, [1 / 3] * 3), (0.5, [0.706, 0.223, 0.071])]
)
@pytest.mark.parametrize("nodes", [1, 4])
def test_classes_are_balanced(balance: float, expected: list[float], nodes: int) -> None:
    """Every epoch has all rare videos; a node's epoch has no frequent video twice."""
    dataset, labels = make_long_tail()
    config = DataConfig(class_balance=balance, canonical_nodes=nodes, shuffle_shards=9)
    order = make_order(dataset, config)
    stream = np.array(list_samples(order, 2 * 3330))
    for samples in (stream[:3330], stream[3330:]):
        fractions = np.bincount(labels[samples], minlength=3) / 3330
        np.testing.assert_allclose(fractions, expected, rtol=0.2)
        repeats = np.bincount(samples, minlength=3330)
        assert repeats[labels == 2].min() >= 1
        # The epochs of several nodes end at other positions than the stream's.
        assert repeats[labels == 0].max() <= (1 if nodes == 1 else 2)
        is_repeated_at_once = samples[1:] == samples[:-1]
        assert is_repeated_at_once.mean() < 0.02, "repeats are spread"


@pytest.mark.parametrize(
    ("balance", "expected"), [(1.0, [1 / 3] * 3), (0.5, [0.706, 0.223, 0.071])]
)
@pytest.mark.parametrize("nodes", [1, 4])
def test_replacements_are_balanced(balance: float, expected: list[float], nodes: int) -> None:
    dataset, labels = make_long_tail()
    config = DataConfig(class_balance=balance, canonical_nodes=nodes, shuffle_shards=9)
    order = make_order(dataset, config)
    samples: list[int] = []
    for position in range(40):
        samples += [order.replacement(position, fraction, 1) for fraction in np.arange(0, 1, 0.05)]
    assert np.bincount(labels[samples])[2] > 400 * expected[2]


def test_a_subset_is_balanced_by_its_own_classes() -> None:
    dataset, labels = make_long_tail()
    order = make_order(dataset, DataConfig(class_balance=1.0, subset=600))
    fractions = np.bincount(labels[list_samples(order, 6000)], minlength=3) / 6000
    np.testing.assert_allclose(fractions, [1 / 3] * 3, rtol=0.25)


def test_classes_are_counted_where_the_dataset_has_no_histogram() -> None:
    config = DataConfig(class_balance=1.0)
    without_histogram, _ = make_long_tail()
    expected = list_samples(make_order(without_histogram, config), 500)
    # As make_shards counts them.
    dataset, _ = make_long_tail()
    histogram = {"class 1": 300, "class 0": 3000, "class 2": 30}
    dataset.info.report["class_histogram"] = histogram
    assert list_samples(make_order(dataset, config), 500) == expected


def test_classes_of_unlabeled_videos_cannot_be_balanced() -> None:
    with pytest.raises(InputError, match=r"data\.class_balance is 1, but made has no labels"):
        make_plan(make_table([9]), DataConfig(class_balance=1.0))

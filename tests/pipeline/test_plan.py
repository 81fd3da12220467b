"""The plan is arithmetic: its promises are checked over many seeds, sizes and world sizes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.plan import (
    EvaluationPlan,
    PlanRow,
    TrainingPlan,
    segment_frames,
    split_step,
    strided_frames,
)
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DatasetInfo, Sample, ShardInfo
from adamae.pipeline.shards.index import Tables
from adamae.shard_tools.write import RowWriter


def make_table(
    counts: list[int],
    num_frames: int = 40,
    frame_stride: int = 1,
    parts: list[int] | None = None,
    rates: Sequence[tuple[int, float, int]] = (),
    labels: Sequence[int] = (),
) -> ShardDataset:
    """A dataset without bytes: shard s holds counts[s] samples and belongs to dataset parts[s].

    rates: number of frames, frames per second and stride of each sample, instead of the same of all.
    """
    if parts:
        of_parts = [
            [count for count, part in zip(counts, parts, strict=True) if part == one]
            for one in {*parts}
        ]
        return ShardDataset([make_table(some).parts[0] for some in of_parts])
    samples = [
        Sample(
            f"k{i}",
            "mp4",
            "h264",
            *(rates[i] if rates else (num_frames, 8.0, frame_stride)),
            64,
            48,
            (labels[i],) if labels else None,
            f"k{i}.mp4",
            f"{i * 7919 % 10007:064d}",
            size=10_000,
        )
        for i in range(sum(counts))
    ]
    shards = [
        ShardInfo(f"shard-{s}.tar", count, 20_000, 64 * "0") for s, count in enumerate(counts)
    ]
    writer, ends = RowWriter(), np.cumsum(counts)
    made = [
        writer.make_rows(samples[end - count : end])
        for end, count in zip(ends, counts, strict=True)
    ]
    info = writer.describe(
        DatasetInfo(
            len(samples), 0, 0, [f"class {label}" for label in sorted({*labels})], {}, shards
        )
    )
    rows = np.concatenate([rows for rows, _, _ in made])
    part = Tables("made", info, np.array(counts), rows, lambda table: Path(table.file))
    part._names = np.frombuffer(b"".join(names for _, _, names in made), np.uint8)
    return ShardDataset([part])


def make_plan(
    dataset: ShardDataset, config: DataConfig | None = None, **others: int
) -> TrainingPlan:
    settings = {"num_frames": 4, "image_size": 32, "seed": 0, "batch_size": 4, **others}
    return TrainingPlan(dataset, config or DataConfig(frame_stride=1), **settings)


def stream(plans: list[TrainingPlan], batches: range) -> list[PlanRow]:
    """The global order that the ranks of one run see batch_multiple."""
    return [row for index in batches for plan in plans for row in plan.batch(index)]


@given(
    counts=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    seed=st.integers(0, 2**64 - 1),
    world=st.sampled_from([1, 2, 3, 5, 6]),
    window=st.integers(1, 4),
    repeats=st.sampled_from([1, 2]),
    nodes=st.sampled_from([1, 2, 3]),
    balance=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60)
def test_every_world_size_sees_the_same_global_order(
    counts: list[int], seed: int, world: int, window: int, repeats: int, nodes: int, balance: float
) -> None:
    """Step by step, so that a run resumes anywhere with any number of processes."""
    dataset = make_table(counts, labels=[number % 3 % 2 for number in range(sum(counts))])
    config = DataConfig(
        frame_stride=1,
        shuffle_shards=window,
        repeats=repeats,
        canonical_nodes=nodes,
        class_balance=balance,
    )
    alone = stream([make_plan(dataset, config, seed=seed, batch_size=12)], range(4))
    shape = {"batch_size": 4, "global_batch": 12, "world_size": world}
    ranks = [make_plan(dataset, config, seed=seed, rank=rank, **shape) for rank in range(world)]
    for step in range(4):
        taken = []
        for plan in ranks:
            first = step * plan.microbatches_per_step
            for microbatch in range(first, first + plan.microbatches_per_step):
                taken += plan.batch(microbatch)
        assert sorted(taken, key=lambda row: row.position) == alone[12 * step : 12 * (step + 1)]
    assert [row.position for row in alone] == list(range(48))


@given(
    groups=st.integers(1, 300),
    multiple=st.sampled_from([1, 2, 3]),
    most=st.integers(1, 40),
    world=st.integers(1, 100),
)
@settings(max_examples=300)
def test_step_is_split_evenly_at_any_number_of_processes(
    groups: int, multiple: int, most: int, world: int
) -> None:
    clips, most, world = groups * multiple, most * multiple, min(world, groups)
    split = [split_step(clips, most, multiple, world, rank) for rank in range(world)]
    assert sorted(clip for mine in split for part in mine for clip in part) == list(range(clips))
    shares = [sum(map(len, mine)) for mine in split]
    assert max(shares) - min(shares) in (0, multiple)
    sizes = {len(part) for mine in split for part in mine}
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) in (0, multiple)
    assert all(size and size % multiple == 0 for size in sizes)
    assert max(map(len, split)) == -(-max(shares) // most)  # no more passes than are needed


def test_step_too_small_for_its_processes_is_refused() -> None:
    with pytest.raises(
        InputError, match="global_batch is 4, and each of 5 processes takes a multiple of 1"
    ):
        make_plan(make_table([9]), global_batch=4, world_size=5)
    with pytest.raises(
        InputError, match="global_batch is 6, and each of 4 processes takes a multiple of 2"
    ):
        make_plan(make_table([9]), global_batch=6, world_size=4, batch_multiple=2)
    with pytest.raises(InputError, match="global_batch is 7: give a multiple of 2"):
        make_plan(make_table([9]), global_batch=7, batch_multiple=2)
    with pytest.raises(InputError, match="batch_size is 1: give at least 2"):
        make_plan(make_table([9]), batch_size=1, batch_multiple=2)


def test_epochs_seeds_and_positions_differ() -> None:
    dataset = make_table([8] * 4)
    orders = [
        tuple(make_plan(dataset, seed=seed).row(p).sample for p in range(64)) for seed in (0, 1)
    ]
    assert orders[0] != orders[1]
    assert orders[0][:32] != orders[0][32:]
    plan = make_plan(dataset)
    rows = [plan.row(position) for position in range(400)]
    assert plan.clips_per_epoch == 32
    starts = Counter(row.frames[0] for row in rows)
    assert set(starts) == set(range(37)), "every start from 0 to 40 - 4"
    assert 150 < sum(row.flip for row in rows) < 250
    assert len({row.crop for row in rows}) > 60


def test_repeats_share_frames_and_differ_in_crops() -> None:
    plan = make_plan(make_table([8] * 2), DataConfig(frame_stride=1, repeats=4), batch_size=8)
    rows = [row for index in range(8) for row in plan.batch(index)]
    groups = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    assert all(len({(row.sample, row.frames) for row in group}) == 1 for group in groups)
    assert sum(len({(row.crop, row.flip) for row in group}) for group in groups) > 3 * len(groups)
    assert plan.clips_per_epoch == 64
    with pytest.raises(InputError, match="give a multiple of 3"):
        make_plan(make_table([8]), DataConfig(frame_stride=1, repeats=3))


@given(
    available=st.integers(1, 200),
    wanted=st.integers(1, 32),
    stride=st.integers(1, 8),
    share=st.floats(0, 1, exclude_max=True),
)
def test_strided_frames_are_in_the_video(
    available: int, wanted: int, stride: int, share: float
) -> None:
    frames = strided_frames(available, wanted, stride, share)
    assert len(frames) == wanted
    assert frames[0] >= 0
    assert frames[-1] <= available - 1
    if available > (wanted - 1) * stride:
        assert {b - a for a, b in pairwise(frames)} <= {stride}
    else:
        assert frames == tuple(min(step * stride, available - 1) for step in range(wanted)), (
            "padded by the last one"
        )


@given(
    available=st.integers(1, 200),
    shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=32),
)
def test_segment_frames_come_one_from_each_part(available: int, shares: list[float]) -> None:
    frames = segment_frames(available, shares)
    assert list(frames) == sorted(frames)
    for part, frame in enumerate(frames):
        assert (
            int(part * available / len(shares))
            <= frame
            <= min((part + 1) * available / len(shares), available - 1)
        )


def test_strides_are_counted_in_source_frames() -> None:
    plan = make_plan(make_table([4], frame_stride=4), DataConfig(frame_stride=8))
    assert {b - a for a, b in pairwise(plan.row(0).frames)} == {2}


def test_clips_by_time_take_as_long_at_any_frame_rate() -> None:
    """Of 12 to 240 frames per second, as they came or thinned by a stride of their own, as `make_shards --fps 8` does;
    every frame is the nearest to its time."""
    kept = [(24.0, 3), (25.0, 3), (30000 / 1001, 4), (120.0, 15), (240.0, 30)]
    as_came = [(round(9 * fps), fps, 1) for fps in (12.0, 25.0, 60.0, 144.0, 240.0)]
    dataset = make_table(
        [4, 6], rates=as_came + [(round(9 * fps / n), fps / n, n) for fps, n in kept]
    )
    plan = make_plan(dataset, DataConfig(fps=6.0), num_frames=16)
    starts = []
    for position in range(200):
        row = plan.row(position)
        fps = dataset.samples[row.sample].fps
        times = np.array(row.frames) / fps
        np.testing.assert_allclose(times - times[0], np.arange(16) / 6, atol=0.5 / fps + 1e-9)
        starts.append(times[0] / (9 - 15 / 6))
    assert np.histogram(starts, 4, (0, 1))[0].min() > 30, "from all of the video"


def test_too_slow_and_too_short_videos_repeat_frames() -> None:
    assert strided_frames(40, 6, 0.5, 0.0) == (0, 1, 1, 2, 2, 3)
    assert strided_frames(40, 4, 2.5, 0.999) == (31, 34, 36, 39)
    assert strided_frames(5, 4, 2.5, 0.7) == (0, 3, 4, 4)
    assert strided_frames(40, 1, 7.5, 0.5) == (20,)


def test_what_was_thinned_for_a_frame_rate_can_be_used() -> None:
    dataset = make_table([3], rates=[(40, 8.0, 3), (40, 7.5, 4), (40, 8.0, 15)])
    with pytest.raises(
        InputError, match=r"one frame of every 3 or 4 or 15: give a multiple of 60, .*data\.fps"
    ):
        make_plan(dataset)
    dataset.info.encode["fps"] = 8.0
    with pytest.raises(InputError, match=r"set data\.fps=8 instead"):
        make_plan(dataset, DataConfig())
    config = DataConfig(fps=8.0)
    test = EvaluationPlan(dataset, config, num_frames=4, image_size=32, batch_size=3)
    for plan in (make_plan(dataset, config), test):
        for row in plan.batch(0):
            assert row.frames == tuple(range(row.frames[0], row.frames[0] + 4))


def test_subsets_are_fixed_and_nested() -> None:
    dataset = make_table([10, 10])

    def shown(count: int, seed: int) -> set[int]:
        plan = make_plan(dataset, DataConfig(frame_stride=1, subset=count), seed=seed)
        assert plan.clips_per_epoch == count
        return {plan.row(position).sample for position in range(2 * count)}

    assert shown(7, seed=0) == shown(7, seed=5)
    assert len(shown(7, seed=0)) == 7
    assert shown(3, seed=0) < shown(7, seed=0)
    with pytest.raises(InputError, match="holds only 20"):
        make_plan(dataset, DataConfig(frame_stride=1, subset=21))


def test_replacement_is_another_video_and_always_the_same() -> None:
    dataset = make_table([20, 20], parts=[0, 1])
    plan = make_plan(dataset, DataConfig(shards=["a", "b"], frame_stride=1))
    rows = [plan.row(position) for position in range(40)]
    others = [plan.replacement(row, 1) for row in rows]
    assert others == [plan.replacement(row, 1) for row in rows]
    assert [row.position for row in others] == list(range(40))
    assert all(
        (row.sample < 20) == (other.sample < 20) for row, other in zip(rows, others, strict=True)
    ), "same dataset"
    assert len({other.sample for other in others}) > 15
    assert [plan.replacement(row, 2).sample for row in rows] != [other.sample for other in others]


@given(
    size=st.integers(1, 13),
    world=st.integers(1, 4),
    temporal=st.integers(1, 5),
    spatial=st.sampled_from([1, 3]),
)
@settings(max_examples=40)
def test_views_are_evaluated_exactly_once_at_any_world_size(
    size: int, world: int, temporal: int, spatial: int
) -> None:
    plans = [
        EvaluationPlan(
            make_table([size]),
            DataConfig(frame_stride=2),
            num_frames=4,
            image_size=32,
            batch_size=6,
            num_temporal=temporal,
            num_spatial=spatial,
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]
    total = size * temporal * spatial
    assert len(plans[0]) == total
    rows = stream(plans, range(total // 6 + 2))
    assert [row.position for row in rows] == list(range(total))
    assert len({(row.sample, row.frames, row.crop) for row in rows}) == total
    assert not any(row.flip for row in rows)
    assert Counter(row.sample for row in rows) == dict.fromkeys(range(size), temporal * spatial)
    assert plans[0].replacement(rows[0], 1) is None


def test_views_lie_evenly_over_the_video() -> None:
    dataset = make_table([1], num_frames=40)
    plan = EvaluationPlan(
        dataset,
        DataConfig(frame_stride=1),
        num_frames=4,
        image_size=32,
        batch_size=6,
        num_temporal=2,
        num_spatial=3,
    )
    rows = plan.batch(0)
    assert [row.frames[0] for row in rows] == [0, 0, 0, 36, 36, 36]
    assert [row.crop for row in rows[:3]] == [(0, 0, 48, 48), (8, 0, 48, 48), (16, 0, 48, 48)]
    one = EvaluationPlan(
        dataset, DataConfig(frame_stride=1), num_frames=4, image_size=32, batch_size=1
    )
    assert one.batch(0)[0].frames == (18, 19, 20, 21)


@pytest.mark.parametrize(
    ("num_temporal", "frames"), [(1, [(5, 15, 25, 35)]), (2, [(0, 10, 20, 30), (5, 15, 25, 35)])]
)
def test_views_of_segments_take_turns_in_every_part(
    num_temporal: int, frames: list[tuple[int, ...]]
) -> None:
    config = DataConfig(frame_stride=1, sampling="segments")
    dataset = make_table([1], num_frames=40)
    plan = EvaluationPlan(
        dataset, config, num_frames=4, image_size=32, batch_size=2, num_temporal=num_temporal
    )
    assert [row.frames for row in plan.batch(0)] == frames


def test_training_clips_follow_the_configuration() -> None:
    dataset = make_table([20], num_frames=160)
    config = DataConfig(
        frame_stride=1,
        sampling="segments",
        crop="random_resized",
        crop_min_area=0.08,
        rand_augment=2,
        rand_augment_magnitude=9,
        repeats=2,
    )
    rows = stream([make_plan(dataset, config)], range(40))
    for row in rows:
        assert [frame // 40 for frame in row.frames] == [0, 1, 2, 3], "one from each quarter"
    inside = {tuple(frame % 40 for frame in row.frames) for row in rows}
    assert all(len(set(places)) > 1 for places in inside), "each at a place of its own"
    areas = [row.crop.width * row.crop.height / (64 * 48) for row in rows]
    assert 0.06 < min(areas) < 0.25
    assert max(areas) > 0.8
    assert {(row.crop.width, row.crop.height) for row in rows} - {(48, 48)}, "not only multiscale's"
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert all(one.frames == other.frames for one, other in pairs), "one decode"
    assert any(one.augment_ops != other.augment_ops for one, other in pairs)
    weaker = stream([make_plan(dataset, replace(config, rand_augment_magnitude=1))], range(40))
    assert [row.augment_ops for row in weaker] != [row.augment_ops for row in rows]

"""The plan is arithmetic: its promises are checked over many seeds, sizes and world sizes."""

import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_videos import make_hashes

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning import sample_order
from adamae.pipeline.planning.plan import (
    NTSC_TOLERANCE,
    ClipPlan,
    EvaluationPlan,
    PlanRow,
    TrainingPlan,
    clip_offsets,
    count_later_starts,
    join_frames,
    segment_frames,
    split_step,
    strided_frames,
)
from adamae.pipeline.planning.sample_order import choose_subset
from adamae.pipeline.reading.cache import ShardCache
from adamae.pipeline.shards import index as index_module
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DatasetInfo, Sample, ShardInfo, TableInfo
from adamae.pipeline.shards.index import Tables
from adamae.shard_tools.write import RowWriter


def make_sample(
    index: int, timing: tuple[int, float, int], labels: tuple[int, ...] | None
) -> Sample:
    """Return a sample without bytes; timing: number of frames, frames per second and stride."""
    num_frames, fps, frame_stride = timing
    return Sample(
        key=f"k{index}",
        container="mp4",
        codec="h264",
        num_frames=num_frames,
        fps=fps,
        frame_stride=frame_stride,
        width=64,
        height=48,
        labels=labels,
        source=f"k{index}.mp4",
        # Hashes whose order is another one than that of the samples.
        sha256=f"{index * 7919 % 10007:064d}",
        size=10_000,
    )


def make_table(
    counts: list[int],
    num_frames: int = 40,
    frame_stride: int = 1,
    timings: Sequence[tuple[int, float, int]] = (),
    labels: Sequence[int] = (),
) -> ShardDataset:
    """Return a dataset without bytes, whose shard s holds counts[s] samples.

    timings: number of frames, frames per second and stride of each sample, which are otherwise the
    same for all.
    """
    if not timings:
        timings = [(num_frames, 8.0, frame_stride)] * sum(counts)
    writer = RowWriter()
    shards = []
    rows = []
    names = b""
    start = 0
    for number, count in enumerate(counts):
        samples = []
        for index in range(start, start + count):
            of_sample = (labels[index],) if labels else None
            samples.append(make_sample(index, timings[index], of_sample))
        shard_rows, _, shard_names = writer.make_rows(samples)
        rows.append(shard_rows)
        names += shard_names
        shards.append(ShardInfo(f"shard-{number}.tar", count, 20_000, "0" * 64))
        start += count
    classes = [f"class {label}" for label in sorted(set(labels))]
    info = writer.describe(DatasetInfo(start, 0, 0, classes, {}, shards))
    tables = Tables("made", info, np.array(counts), lambda table: Path(table.file))
    tables.rows = np.concatenate(rows)
    tables._names = np.frombuffer(names, np.uint8)
    return ShardDataset([tables])


def make_mix(*counts: list[int]) -> ShardDataset:
    """Return a mix of datasets without bytes, each with shards of so many samples."""
    return ShardDataset([make_table(part).parts[0] for part in counts])


def make_plan(
    dataset: ShardDataset, config: DataConfig | None = None, **changes: int
) -> TrainingPlan:
    settings = {"num_frames": 4, "image_size": 32, "seed": 0, "batch_size": 4, **changes}
    return TrainingPlan(dataset, config or DataConfig(frame_stride=1), **settings)


def stream(plans: Sequence[ClipPlan], num_batches: int) -> list[PlanRow]:
    """Return the clips of all ranks, batch after batch."""
    rows = []
    for index in range(num_batches):
        for plan in plans:
            rows += plan.batch(index)
    return rows


def list_step(plans: list[TrainingPlan], step: int) -> list[PlanRow]:
    """Return the clips of all ranks in a step, in the order of the stream."""
    rows = []
    for plan in plans:
        first = step * plan.microbatches_per_step
        for index in range(first, first + plan.microbatches_per_step):
            rows += plan.batch(index)
    return sorted(rows, key=lambda row: row.position)


@given(
    counts=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    seed=st.integers(0, 2**64 - 1),
    world_size=st.sampled_from([1, 2, 3, 5, 6]),
    config=st.builds(
        DataConfig,
        frame_stride=st.just(1),
        shuffle_shards=st.integers(1, 4),
        repeats=st.sampled_from([1, 2]),
        canonical_nodes=st.sampled_from([1, 2, 3]),
        class_balance=st.sampled_from([0.0, 1.0]),
    ),
)
@settings(max_examples=60)
def test_every_world_size_sees_the_same_global_order(
    counts: list[int], seed: int, world_size: int, config: DataConfig
) -> None:
    """Step by step, so that a run resumes anywhere with any number of processes."""
    dataset = make_table(counts, labels=[index % 3 % 2 for index in range(sum(counts))])
    expected = stream([make_plan(dataset, config, seed=seed, batch_size=12)], 4)
    assert [row.position for row in expected] == list(range(48))
    plans = [
        make_plan(
            dataset,
            config,
            seed=seed,
            batch_size=4,
            global_batch=12,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    for step in range(4):
        assert list_step(plans, step) == expected[12 * step : 12 * (step + 1)]


@given(
    num_groups=st.integers(1, 300),
    multiple=st.sampled_from([1, 2, 3]),
    max_groups=st.integers(1, 40),
    world_size=st.integers(1, 100),
)
@settings(max_examples=300)
def test_step_is_split_evenly_at_any_number_of_processes(
    num_groups: int, multiple: int, max_groups: int, world_size: int
) -> None:
    num_clips = num_groups * multiple
    max_clips = max_groups * multiple
    world_size = min(world_size, num_groups)
    clips: list[int] = []
    clips_of_ranks = []
    passes_of_ranks = []
    sizes = set()
    for rank in range(world_size):
        passes = split_step(num_clips, max_clips, multiple, world_size, rank)
        for microbatch in passes:
            clips += microbatch
            sizes.add(len(microbatch))
        clips_of_ranks.append(sum(map(len, passes)))
        passes_of_ranks.append(len(passes))
    assert sorted(clips) == list(range(num_clips))
    assert max(clips_of_ranks) - min(clips_of_ranks) in (0, multiple)
    assert min(sizes) > 0
    assert max(sizes) <= max_clips
    assert max(sizes) - min(sizes) in (0, multiple)
    assert all(size % multiple == 0 for size in sizes)
    num_needed = math.ceil(max(clips_of_ranks) / max_clips)
    assert max(passes_of_ranks) == num_needed


def test_the_example_of_split_step() -> None:
    assert split_step(20, 6, 2, 2, rank=0) == [range(4), range(8, 14)]
    assert split_step(20, 6, 2, 2, rank=1) == [range(4, 8), range(14, 20)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"global_batch": 4, "world_size": 5},
            "global_batch is 4, and each of 5 processes takes a multiple of 1",
        ),
        (
            {"global_batch": 6, "world_size": 4, "batch_multiple": 2},
            "global_batch is 6, and each of 4 processes takes a multiple of 2",
        ),
        ({"global_batch": 7, "batch_multiple": 2}, "global_batch is 7: give a multiple of 2"),
        ({"batch_size": 1, "batch_multiple": 2}, "batch_size is 1: give at least 2"),
    ],
)
def test_step_too_small_for_its_processes_is_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_plan(make_table([9]), **changes)


def test_epochs_seeds_and_positions_differ() -> None:
    dataset = make_table([8] * 4)
    plan = make_plan(dataset)
    assert plan.clips_per_epoch == 32
    rows = [plan.row(position) for position in range(400)]
    samples = [row.sample for row in rows[:64]]
    assert samples[:32] != samples[32:]
    other_plan = make_plan(dataset, seed=1)
    assert samples != [other_plan.row(position).sample for position in range(64)]
    starts = {row.frames[0] for row in rows}
    assert starts == set(range(37)), "every start from 0 to 40 - 4"
    assert 150 < sum(row.flip for row in rows) < 250
    assert len({row.crop for row in rows}) > 60


def test_repeats_share_frames_and_differ_in_crops() -> None:
    plan = make_plan(make_table([8] * 2), DataConfig(frame_stride=1, repeats=4), batch_size=8)
    assert plan.clips_per_epoch == 64
    rows = stream([plan], 8)
    num_crops = 0
    for start in range(0, len(rows), 4):
        repeats = rows[start : start + 4]
        assert len({(row.sample, row.frames) for row in repeats}) == 1
        num_crops += len({(row.crop, row.flip) for row in repeats})
    assert num_crops > 3 * len(rows) / 4


def test_views_begin_apart_in_one_longer_clip() -> None:
    """Clips of 4 frames at 8 a second that begin up to half a second apart: in 8 frames, at 5."""
    config = DataConfig(frame_stride=1, repeats=4, views_apart_s=0.5)
    plan = make_plan(make_table([8] * 2), config, batch_size=8)
    rows = stream([plan], 600)
    starts = set()
    for first in range(0, len(rows), 4):
        views = rows[first : first + 4]
        assert len({row.sample for row in views}) == 1
        shown = join_frames(views)
        assert shown[-1] - shown[0] < 8
        for row in views:
            assert row.frames == tuple(range(row.frames[0], row.frames[0] + 4))
            starts.add(row.frames[0] - shown[0])
    assert starts == set(range(5))
    assert {row.frames[0] for row in rows} >= {0, 36}, "the first and the last possible start"
    # A row is the same in any batch, world size or order.
    other = make_plan(make_table([8] * 2), config, batch_size=4, global_batch=8, world_size=2)
    assert [other.row(row.position) for row in reversed(rows)] == rows[::-1]


def test_views_of_videos_without_spare_frames_share_them() -> None:
    config = DataConfig(frame_stride=1, repeats=2, views_apart_s=2)
    for num_frames in (3, 4):
        plan = make_plan(make_table([8], num_frames=num_frames), config)
        for row in stream([plan], 4):
            assert row.frames == tuple(min(index, num_frames - 1) for index in range(4))
    plan = make_plan(make_table([8], num_frames=5), config, batch_size=8)
    assert {row.frames[0] for row in stream([plan], 8)} == {0, 1}


@given(
    stored_frames=st.integers(1, 100),
    step=st.one_of(st.integers(1, 9).map(float), st.floats(0.05, 9)),
    num_frames=st.integers(1, 16),
    apart_s=st.floats(0.1, 20),
)
def test_as_many_views_begin_later_as_a_video_has_frames_for(
    stored_frames: int, step: float, num_frames: int, apart_s: float
) -> None:
    config = DataConfig(frame_stride=1, repeats=2, views_apart_s=apart_s)
    num_later = count_later_starts(stored_frames, 10, step, num_frames, config)
    possible = [
        later
        for later in range(math.floor(apart_s * 10 / step + NTSC_TOLERANCE) + 1)
        if clip_offsets(num_frames + later, step)[-1] < stored_frames
    ]
    assert num_later == max(possible, default=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"repeats": 1}, "raise data.repeats"), ({"repeats": 2, "sampling": "segments"}, "remove it")],
)
def test_views_apart_need_several_clips_of_a_stride(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        DataConfig(views_apart_s=2, **options)


def test_repeats_that_do_not_fit_a_batch_are_refused() -> None:
    with pytest.raises(InputError, match="give a multiple of 3"):
        make_plan(make_table([8]), DataConfig(frame_stride=1, repeats=3))


@given(
    num_available=st.integers(1, 200),
    num_frames=st.integers(1, 32),
    stride=st.integers(1, 8),
    fraction=st.floats(0, 1, exclude_max=True),
)
def test_strided_frames_are_in_the_video(
    num_available: int, num_frames: int, stride: int, fraction: float
) -> None:
    frames = strided_frames(num_available, num_frames, stride, fraction)
    assert len(frames) == num_frames
    assert frames[0] >= 0
    assert frames[-1] <= num_available - 1
    if num_available > (num_frames - 1) * stride:
        assert {later - earlier for earlier, later in pairwise(frames)} <= {stride}
    else:
        last = num_available - 1
        expected = [min(index * stride, last) for index in range(num_frames)]
        assert list(frames) == expected, "padded by the last one"


@given(
    num_available=st.integers(1, 200),
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=32),
)
def test_segment_frames_come_one_from_each_part(num_available: int, numbers: list[float]) -> None:
    frames = segment_frames(num_available, numbers)
    assert list(frames) == sorted(frames)
    for segment, frame in enumerate(frames):
        start = segment * num_available / len(numbers)
        end = (segment + 1) * num_available / len(numbers)
        assert int(start) <= frame <= min(end, num_available - 1)


def test_the_example_of_segment_frames() -> None:
    assert segment_frames(12, [0, 0.5, 0.9]) == (0, 6, 11)


def test_strides_are_counted_in_source_frames() -> None:
    plan = make_plan(make_table([4], frame_stride=4), DataConfig(frame_stride=8))
    frames = plan.row(0).frames
    assert {later - earlier for earlier, later in pairwise(frames)} == {2}


def test_clips_by_time_take_as_long_at_any_frame_rate() -> None:
    """Every frame is the nearest to its time, whatever the frame rate of the video.

    Videos of 9 seconds have 12 to 240 frames per second. Some store all, others are thinned by a
    stride of their own, as `make_shards --fps 8` does.
    """
    timings = [(round(9 * fps), fps, 1) for fps in (12.0, 25.0, 60.0, 144.0, 240.0)]
    for fps, stride in ((24.0, 3), (25.0, 3), (30000 / 1001, 4), (120.0, 15), (240.0, 30)):
        timings.append((round(9 * fps / stride), fps / stride, stride))
    dataset = make_table([4, 6], timings=timings)
    plan = make_plan(dataset, DataConfig(fps=6.0), num_frames=16)
    starts = []
    for position in range(200):
        row = plan.row(position)
        fps = dataset.samples[row.sample].fps
        times = np.array(row.frames) / fps
        np.testing.assert_allclose(times - times[0], np.arange(16) / 6, atol=0.5 / fps + 1e-9)
        starts.append(times[0] / (9 - 15 / 6))
    histogram, _ = np.histogram(starts, 4, (0, 1))
    assert histogram.min() > 30, "from all of the video"


def test_too_slow_and_too_short_videos_repeat_frames() -> None:
    assert strided_frames(40, 6, 0.5, 0.0) == (0, 1, 1, 2, 2, 3)
    assert strided_frames(40, 4, 2.5, 0.999) == (31, 34, 36, 39)
    assert strided_frames(5, 4, 2.5, 0.7) == (0, 3, 4, 4)
    assert strided_frames(40, 1, 7.5, 0.5) == (20,)
    # Drawn in the docstring.
    assert strided_frames(12, 4, 2.5, 0.3) == (1, 4, 6, 9)
    assert strided_frames(5, 4, 2.5, 0.3) == (0, 3, 4, 4)


def test_what_was_thinned_for_a_frame_rate_can_be_used() -> None:
    dataset = make_table([3], timings=[(40, 8.0, 3), (40, 7.5, 4), (40, 8.0, 15)])
    says = r"one frame of every 3 or 4 or 15: give data\.frame_stride=60 .*data\.fps="
    with pytest.raises(InputError, match=says):
        make_plan(dataset)
    dataset.info.encode["fps"] = 8.0
    with pytest.raises(InputError, match=r"give data\.fps=8$"):
        make_plan(dataset, DataConfig())
    config = DataConfig(fps=8.0)
    evaluation = EvaluationPlan(dataset, config, num_frames=4, image_size=32, batch_size=3)
    for plan in (make_plan(dataset, config), evaluation):
        for row in plan.batch(0):
            first = row.frames[0]
            assert row.frames == (first, first + 1, first + 2, first + 3)


def test_subsets_are_fixed_and_nested() -> None:
    dataset = make_table([10, 10])

    def list_subset(count: int, seed: int) -> set[int]:
        plan = make_plan(dataset, DataConfig(frame_stride=1, subset=count), seed=seed)
        assert plan.clips_per_epoch == count
        return {plan.row(position).sample for position in range(2 * count)}

    subset = list_subset(7, seed=0)
    assert len(subset) == 7
    assert list_subset(7, seed=5) == subset
    assert list_subset(3, seed=0) < subset
    with pytest.raises(InputError, match="holds only 20"):
        make_plan(dataset, DataConfig(frame_stride=1, subset=21))


@pytest.mark.parametrize("count", [1, 37, 600, 999])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_subset_has_the_smallest_hashes_whatever_the_blocks(
    monkeypatch: pytest.MonkeyPatch, count: int, seed: int
) -> None:
    dataset = make_hashes(1000)
    words = dataset.column("sha256").view(">u8").reshape(-1, 4).astype(object)
    words[:, 0] ^= seed * 0x9E3779B97F4A7C15 % 2**64
    expected = sorted(range(1000), key=lambda row: tuple(words[row]))[:count]
    config = DataConfig(subset=count, subset_seed=seed)
    for block in (7, 64, 2**18):
        monkeypatch.setattr(index_module, "BLOCK_ROWS", block)
        monkeypatch.setattr(sample_order, "BLOCK_ROWS", block)
        assert choose_subset(dataset, config).tolist() == sorted(expected)


def test_choosing_a_subset_takes_the_memory_of_some_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "BLOCK_ROWS", 2**10)
    monkeypatch.setattr(sample_order, "BLOCK_ROWS", 2**10)
    dataset = make_hashes(200_000)
    tracemalloc.start()
    choose_subset(dataset, DataConfig(subset=1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The hashes alone are 6.4 MB.
    assert peak < 1e6


def test_the_subset_of_a_large_dataset_is_chosen_once_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sample_order, "STORED_ABOVE", 19)
    dataset = make_table([10, 10])
    for name in ("shards", "samples"):
        dataset.info.tables[name] = TableInfo(name, 20, 0, sha256=name)
    dataset.cache = ShardCache(tmp_path)
    config = DataConfig(subset=7)
    subset = choose_subset(dataset, config).tolist()
    assert len(subset) == 7
    monkeypatch.setattr(Tables, "read_hashes", None)
    assert choose_subset(dataset, config).tolist() == subset
    with pytest.raises(TypeError):
        choose_subset(dataset, DataConfig(subset=8))


def test_replacement_is_another_video_and_always_the_same() -> None:
    dataset = make_mix([20], [20])
    plan = make_plan(dataset, DataConfig(shards=["a", "b"], frame_stride=1))
    rows = [plan.row(position) for position in range(40)]
    replacements = [plan.replacement(row, 1) for row in rows]
    assert replacements == [plan.replacement(row, 1) for row in rows]
    for row, replacement in zip(rows, replacements, strict=True):
        assert replacement.position == row.position
        assert (replacement.sample < 20) == (row.sample < 20), "same dataset"
    samples = [replacement.sample for replacement in replacements]
    assert len(set(samples)) > 15
    assert [plan.replacement(row, 2).sample for row in rows] != samples


@given(
    size=st.integers(1, 13),
    world_size=st.integers(1, 4),
    num_temporal=st.integers(1, 5),
    num_spatial=st.sampled_from([1, 3]),
)
@settings(max_examples=40)
def test_views_are_evaluated_exactly_once_at_any_world_size(
    size: int, world_size: int, num_temporal: int, num_spatial: int
) -> None:
    plans = [
        EvaluationPlan(
            make_table([size]),
            DataConfig(frame_stride=2),
            num_frames=4,
            image_size=32,
            batch_size=6,
            num_temporal=num_temporal,
            num_spatial=num_spatial,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    num_clips = size * num_temporal * num_spatial
    assert len(plans[0]) == num_clips
    rows = stream(plans, num_clips // 6 + 2)
    assert [row.position for row in rows] == list(range(num_clips))
    assert len({(row.sample, row.frames, row.crop) for row in rows}) == num_clips
    assert not any(row.flip for row in rows)
    views_per_sample = num_temporal * num_spatial
    assert Counter(row.sample for row in rows) == dict.fromkeys(range(size), views_per_sample)
    assert plans[0].replacement(rows[0], 1) is None


def test_views_lie_evenly_over_the_video() -> None:
    dataset = make_table([1], num_frames=40)
    config = DataConfig(frame_stride=1)
    plan = EvaluationPlan(
        dataset, config, num_frames=4, image_size=32, batch_size=6, num_temporal=2, num_spatial=3
    )
    rows = plan.batch(0)
    assert [row.frames[0] for row in rows] == [0, 0, 0, 36, 36, 36]
    assert [row.crop for row in rows[:3]] == [(0, 0, 48, 48), (8, 0, 48, 48), (16, 0, 48, 48)]
    single = EvaluationPlan(dataset, config, num_frames=4, image_size=32, batch_size=1)
    (row,) = single.batch(0)
    assert row.frames == (18, 19, 20, 21)


@pytest.mark.parametrize(
    ("num_temporal", "expected"), [(1, [(5, 15, 25, 35)]), (2, [(0, 10, 20, 30), (5, 15, 25, 35)])]
)
def test_views_of_segments_take_turns_in_every_part(
    num_temporal: int, expected: list[tuple[int, ...]]
) -> None:
    config = DataConfig(frame_stride=1, sampling="segments")
    dataset = make_table([1], num_frames=40)
    plan = EvaluationPlan(
        dataset, config, num_frames=4, image_size=32, batch_size=2, num_temporal=num_temporal
    )
    assert [row.frames for row in plan.batch(0)] == expected


@pytest.fixture
def finetuning() -> DataConfig:
    """Options as for fine-tuning, with two crops of each clip."""
    return DataConfig(
        frame_stride=1,
        sampling="segments",
        crop="random_resized",
        crop_min_area=0.08,
        rand_augment=2,
        rand_augment_magnitude=9,
        repeats=2,
    )


def test_frames_follow_the_configuration(finetuning: DataConfig) -> None:
    rows = stream([make_plan(make_table([20], num_frames=160), finetuning)], 40)
    frames_in_segments = set()
    for row in rows:
        assert [frame // 40 for frame in row.frames] == [0, 1, 2, 3], "one from each quarter"
        frames_in_segments.add(tuple(frame % 40 for frame in row.frames))
    for frames in frames_in_segments:
        assert len(set(frames)) > 1, "each at an offset of its own"


def test_crops_follow_the_configuration(finetuning: DataConfig) -> None:
    rows = stream([make_plan(make_table([20], num_frames=160), finetuning)], 40)
    areas = [row.crop.width * row.crop.height / (64 * 48) for row in rows]
    assert 0.06 < min(areas) < 0.25
    assert max(areas) > 0.8
    sizes = {(row.crop.width, row.crop.height) for row in rows}
    assert sizes - {(48, 48)}, "not only multiscale's"


def test_augmentations_follow_the_configuration(finetuning: DataConfig) -> None:
    dataset = make_table([20], num_frames=160)
    rows = stream([make_plan(dataset, finetuning)], 40)
    num_different = 0
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first.frames == second.frames, "one decode"
        num_different += first.augment_ops != second.augment_ops
    assert num_different > 0
    weaker_config = replace(finetuning, rand_augment_magnitude=1)
    weaker = stream([make_plan(dataset, weaker_config)], 40)
    assert [row.augment_ops for row in weaker] != [row.augment_ops for row in rows]

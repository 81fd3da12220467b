"""ClipDataset gives the clips of training to any loop, and resumes exactly."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import open_loader
from torch.utils.data import DataLoader

from adamae.common.errors import InputError
from adamae.pipeline.clip_dataset import ClipDataset
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import Batch
from adamae.pipeline.shards.dataset import ShardDataset

SETTINGS: dict[str, Any] = {
    "num_frames": 4,
    "image_size": 32,
    "batch_size": 5,
    "seed": 3,
    "frame_stride": 2,
    "num_workers": 1,
}


def read(clips: Iterable[Batch], count: int) -> list[Batch]:
    """Read batches, and copy their clips, whose memory would stay in use."""
    return [replace(batch, clip=batch.clip.clone()) for batch in islice(clips, count)]


def check_equal(batches: Sequence[Batch], expected: Sequence[Batch]) -> None:
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.keys == expected_batch.keys
        assert batch.positions == expected_batch.positions
        assert torch.equal(batch.clip, expected_batch.clip)


def test_a_plain_loop_gets_the_clips_of_training(short_shards: Path) -> None:
    config = DataConfig(shards=str(short_shards), frame_stride=2)
    dataset = ShardDataset.open(config)
    with open_loader(dataset, config, num_frames=4, seed=3, batch_size=5) as (_, loader):
        expected = read(loader.batches(0), 6)
    clips = ClipDataset(short_shards, **SETTINGS)
    check_equal(read(DataLoader(clips, batch_size=None), 6), expected)
    assert clips.classes == ["class 0", "class 1", "class 2"]
    assert clips.batches_per_epoch == 12 / 5


@pytest.mark.parametrize("num_read", [1, 4])
def test_it_continues_where_its_state_was_taken(short_shards: Path, num_read: int) -> None:
    expected = read(ClipDataset(short_shards, **SETTINGS), 7)
    first = ClipDataset(short_shards, **SETTINGS)
    check_equal(read(first, num_read), expected[:num_read])
    state = first.state_dict()
    second = ClipDataset(short_shards, **SETTINGS)
    second.load_state_dict(state)
    check_equal(read(second, 7 - num_read), expected[num_read:])
    other = ClipDataset(short_shards, **{**SETTINGS, "batch_size": 4})
    message = "state is of clips with another batch_size: give what it was saved with"
    with pytest.raises(InputError, match=message):
        other.load_state_dict(state)
    for no_state in (None, [], {}, {"model": 1}):
        with pytest.raises(InputError, match=r"is no state: give what state_dict\(\) returned"):
            second.load_state_dict(no_state)


def test_ranks_share_the_batches_of_a_step(
    short_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    positions: list[int] = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        for batch in read(ClipDataset(short_shards, **SETTINGS), 3):
            positions += batch.positions
    assert sorted(positions) == list(range(30))


def test_a_validation_has_every_video_once_at_any_number_of_ranks(
    short_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_frames": 4, "image_size": 32, "frame_stride": 2, "num_workers": 1}
    whole = ClipDataset.validation(short_shards, batch_size=5, **options)
    expected = read(whole, 99)
    assert len(whole) == len(expected) == 3
    check_equal(read(DataLoader(whole, batch_size=None), 99), expected)
    clips: dict[str, torch.Tensor] = {}
    labels: dict[str, int] = {}
    for batch in expected:
        clips |= dict(zip(batch.keys, batch.clip, strict=True))
        labels |= dict(zip(batch.keys, batch.labels.tolist(), strict=True))
    samples = ShardDataset.open(str(short_shards)).samples
    assert labels == {sample.key: sample.label for sample in samples}
    assert whole.classes == ["class 0", "class 1", "class 2"]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    keys: list[str] = []
    for rank in range(3):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        of_rank = ClipDataset.validation(short_shards, batch_size=2, **options)
        batches = read(of_rank, 99)
        assert len(batches) == len(of_rank)
        for batch in batches:
            keys += batch.keys
            for key, clip in zip(batch.keys, batch.clip, strict=True):
                assert torch.equal(clip, clips[key])
    assert sorted(keys) == sorted(clips)


def test_views_of_a_validation(short_shards: Path) -> None:
    views = ClipDataset.validation(
        short_shards, num_frames=2, image_size=32, batch_size=6, clips=2, crops=3
    )
    for batch in read(views, 99):
        assert batch.keys == [batch.keys[0]] * 6
    message = "an evaluation has no crop, flip: leave it out"
    with pytest.raises(InputError, match=message):
        ClipDataset.validation(short_shards, crop="multiscale", flip=False)
    with pytest.raises(InputError, match="no option clip: did you mean clips"):
        ClipDataset.validation(short_shards, clip=2)
    with pytest.raises(InputError, match="batch_size 8 is not a multiple of the 3 spatial views"):
        ClipDataset.validation(short_shards, crops=3)


def test_workers_are_refused(short_shards: Path) -> None:
    clips = ClipDataset(short_shards, **SETTINGS)
    with pytest.raises(InputError, match="others would repeat them: set num_workers=0"):
        next(iter(DataLoader(clips, batch_size=None, num_workers=2)))


def test_options_that_do_not_exist_or_make_no_sense_are_refused(short_shards: Path) -> None:
    with pytest.raises(InputError, match="frame_stride"):
        ClipDataset(short_shards, frame_stride=0)
    message = "ClipDataset has no option stride: did you mean frame_stride"
    with pytest.raises(InputError, match=message):
        ClipDataset(short_shards, stride=2)

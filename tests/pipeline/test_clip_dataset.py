from itertools import islice
from pathlib import Path

import pytest
import torch
from loading import open_loader
from torch.utils.data import DataLoader

from adamae.common.errors import InputError
from adamae.pipeline.clip_dataset import ClipDataset
from adamae.pipeline.config import DataConfig
from adamae.pipeline.shards.dataset import ShardDataset

CLIPS = {"num_frames": 4, "image_size": 32, "batch_size": 5, "seed": 3, "frame_stride": 2}


def read(clips, count: int) -> list[tuple[list[str], list[int], torch.Tensor]]:
    return [(batch.keys, batch.positions, batch.clip.clone()) for batch in islice(clips, count)]


def is_same(one, other) -> bool:
    return all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(one, other, strict=True))


def test_a_plain_loop_gets_the_clips_of_training(short_shards: Path) -> None:
    config = DataConfig(shards=str(short_shards), frame_stride=2)
    with open_loader(ShardDataset.open(config), config, num_frames=4, seed=3, batch_size=5) as (
        _,
        loader,
    ):
        expected = read(loader.batches(0), 6)
    clips = ClipDataset(short_shards, **CLIPS)
    assert is_same(read(DataLoader(clips, batch_size=None), 6), expected)
    assert clips.classes == ["class 0", "class 1", "class 2"]
    assert clips.batches_per_epoch == 12 / 5


@pytest.mark.parametrize("taken", [1, 4])
def test_it_goes_on_where_its_state_was_taken(short_shards: Path, taken: int) -> None:
    whole = read(ClipDataset(short_shards, **CLIPS), 7)
    first = ClipDataset(short_shards, **CLIPS)
    assert is_same(read(first, taken), whole[:taken])
    second = ClipDataset(short_shards, **CLIPS)
    second.load_state_dict(first.state_dict())
    assert is_same(read(second, 7 - taken), whole[taken:])
    with pytest.raises(
        InputError, match="state is of clips with another batch_size: give what it was saved with"
    ):
        ClipDataset(short_shards, **{**CLIPS, "batch_size": 4}).load_state_dict(first.state_dict())


def test_ranks_share_the_batches_of_a_step(short_shards: Path, monkeypatch) -> None:
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    positions = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        positions += [
            place
            for _, places, _ in read(ClipDataset(short_shards, **CLIPS), 3)
            for place in places
        ]
    assert sorted(positions) == list(range(30))


def test_workers_are_refused(short_shards: Path) -> None:
    with pytest.raises(InputError, match="others would repeat them: set num_workers=0"):
        next(iter(DataLoader(ClipDataset(short_shards, **CLIPS), batch_size=None, num_workers=2)))
    with pytest.raises(InputError, match="frame_stride"):
        ClipDataset(short_shards, frame_stride=0)
    with pytest.raises(
        InputError, match="ClipDataset has no option stride: did you mean frame_stride"
    ):
        ClipDataset(short_shards, stride=2)

"""Small synthetic videos, and a short way to make shards of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from shard_making import NUM_FRAMES, NUM_VIDEOS, make

from shard_tools import synthetic_videos


@pytest.fixture(scope="session")
def draw(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """draw("--codec", "vp9") draws one video and returns its path."""

    def one(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("drawn")
        synthetic_videos.main([str(folder), "--num-videos", "1", "--size", "64", *options])
        return next(path for path in folder.glob("*/*") if path.suffix != ".json")

    return one


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small videos in three classes."""
    folder = tmp_path_factory.mktemp("videos")
    options = ["--num-videos", str(NUM_VIDEOS), "--num-frames", str(NUM_FRAMES), "--size", "64", "--classes", "3"]
    synthetic_videos.main([str(folder), *options])
    return folder


@pytest.fixture(scope="session")
def dataset(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of `videos` with the default settings, three samples each."""
    folder = tmp_path_factory.mktemp("shards") / "dataset"
    assert make(videos, folder, "--samples-per-shard", "3") == 0
    return folder

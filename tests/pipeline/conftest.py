from collections.abc import Callable
from pathlib import Path

import pytest
from made_videos import encode, store, write_shards

from pipeline.shards.dataset import ShardDataset

MakeDataset = Callable[..., ShardDataset]


@pytest.fixture(scope="session")
def short_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 H.264 videos of 20 frames, 64×48, GOPs of 8; frame k of video i shows number i + k."""
    videos = [(f"v{i:02d}", encode(20, options={"g": "8", "bf": "0"}, first=i)) for i in range(12)]
    return write_shards(tmp_path_factory.mktemp("data") / "short", videos, classes=3)


@pytest.fixture(scope="session")
def vp9_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 VP9 videos of noise, which DALI decodes on the CPU too, slightly differently from PyAV."""
    videos = [(f"v{i:02d}", store("vp9", 20, first=i)) for i in range(6)]
    return write_shards(tmp_path_factory.mktemp("data") / "vp9", videos)


@pytest.fixture(scope="session")
def jpeg_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in MJPEG as make_shards stores it, which DALI decodes picture by picture."""
    videos = [(f"v{i:02d}", store("mjpeg", 20, first=i)) for i in range(6)]
    return write_shards(tmp_path_factory.mktemp("data") / "jpeg", videos)


@pytest.fixture
def short(short_shards: Path) -> ShardDataset:
    return ShardDataset.open(short_shards)


@pytest.fixture
def vp9(vp9_shards: Path) -> ShardDataset:
    return ShardDataset.open(vp9_shards)


@pytest.fixture
def jpeg(jpeg_shards: Path) -> ShardDataset:
    return ShardDataset.open(jpeg_shards)

"""Datasets that several tests of the pipeline read."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from made_videos import encode, store, write_shards

from adamae.pipeline.shards.dataset import ShardDataset

# The same examples every time, and no limits of time, so that no test fails by chance.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def short_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make 12 H.264 videos of 20 frames, 64×48, in GOPs of 8.

    Frame k of video i shows number i + k.
    """
    options = {"g": "8", "bf": "0"}
    videos = [(f"v{i:02d}", encode(20, options=options, first=i)) for i in range(12)]
    return write_shards(tmp_path_factory.mktemp("data") / "short", videos, classes=3)


@pytest.fixture
def short(short_shards: Path) -> ShardDataset:
    return ShardDataset.open(short_shards)


def store_six(codec: str, tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Make shards of six videos; frame k of video i shows number i + k."""
    videos = [(f"v{i:02d}", store(codec, 20, first=i)) for i in range(6)]
    return ShardDataset.open(write_shards(tmp_path_factory.mktemp("data") / codec, videos))


@pytest.fixture(scope="session")
def vp9(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Make 6 VP9 videos of noise, which DALI decodes on the CPU, too.

    Its pixels differ slightly from those of PyAV.
    """
    return store_six("vp9", tmp_path_factory)


@pytest.fixture(scope="session")
def jpeg(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Make 6 videos in MJPEG as make_shards stores it, which DALI decodes picture by picture."""
    return store_six("mjpeg", tmp_path_factory)

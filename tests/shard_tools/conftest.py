"""Small synthetic videos, and shards of them.

Videos are processed in this process unless a test asks for workers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shard_making import NUM_FRAMES, NUM_VIDEOS, make, run_here

from adamae.shard_tools import synthetic_videos
from adamae.shard_tools.workers import ENGINES

PROCESSES = ENGINES["processes"]


@pytest.fixture(scope="package")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """generate("--codec", "vp9") makes one video and returns its path."""

    def generate_video(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("generated")
        synthetic_videos.main([str(folder), "--num-videos", "1", "--size", "64", *options])
        return next(path for path in folder.glob("*/*") if path.suffix != ".json")

    return generate_video


@pytest.fixture(scope="package")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small videos in three classes."""
    folder = tmp_path_factory.mktemp("videos")
    options = (
        f"--num-videos {NUM_VIDEOS} --num-frames {NUM_FRAMES} --size 64 --classes right left down"
    )
    synthetic_videos.main([str(folder), *options.split()])
    return folder


@pytest.fixture(scope="package")
def dataset(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of `videos` with the default settings, three samples each."""
    folder = tmp_path_factory.mktemp("shards") / "dataset"
    assert make(videos, folder, "--samples-per-shard", "3") == 0
    return folder


@pytest.fixture(scope="package", autouse=True)
def _in_this_process() -> Iterator[None]:
    """Run jobs in this process: spawning a worker takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "processes", run_here)
        yield


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give worker processes to tests that ask for them."""
    monkeypatch.setitem(ENGINES, "processes", PROCESSES)

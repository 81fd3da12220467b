"""Fixtures that tests of several folders share."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import object_store
import pytest

# One thread per test process, set before torch is imported: `make test` runs one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from safetensors.torch import save_file

if not torch.cuda.is_available():
    # Triton's interpreter runs kernels on CPU tensors. It must be set before kernels/ is imported,
    # so nothing above may import that.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU if there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch before every test and its fixtures: torch 2.15 seeds every process differently."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_folder() -> Path | None:
    """Return the folder of real clips and reference values beside the repository, or None."""
    folder = Path(os.environ.get("ADAMAE_TEST_VIDEOS", Path(__file__).parents[2] / "shared"))
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def synthetic_videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make sixteen synthetic videos of two classes, 64×64, with their motion sidecars."""
    from adamae.shard_tools import synthetic_videos

    folder = tmp_path_factory.mktemp("videos")
    options = ["--num-videos=16", "--size=64", "--num-frames=32", "--classes", "right", "left"]
    synthetic_videos.main([str(folder), *options])
    return folder


@pytest.fixture(scope="session")
def synthetic_shards(tmp_path_factory: pytest.TempPathFactory, synthetic_videos: Path) -> Path:
    """Make shards of every second frame of the synthetic videos."""
    from adamae.shard_tools import make_shards

    folder = tmp_path_factory.mktemp("shards") / "shards"
    options = ["--frame-stride=2", "--workers=1"]
    assert make_shards.main([str(synthetic_videos), str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, synthetic_shards: Path) -> Path:
    """Pre-train a tiny model for six steps, with checkpoints after steps 3 and 6.

    All tests read this folder: copy it to change it.
    """
    from tiny import TINY

    from adamae.train import train
    from adamae.training.config import parse

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(parse([*TINY, f"data.shards={synthetic_shards}", f"run={folder}"]))
    return folder


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run directory as train.py does.

    The models are its checkpoints after steps 5, 10, …
    """

    def write(*models: torch.nn.Module, frame_stride: int = 4) -> Path:
        for number, model in enumerate(models, 1):
            folder = tmp_path / f"run/checkpoints/step-{5 * number:08d}"
            folder.mkdir(parents=True)
            save_file(model.state_dict(), folder / "model.safetensors")
        config = {"model": vars(models[-1].config), "data": {"frame_stride": frame_stride}}
        # JSON is YAML.
        (tmp_path / "run/config.yaml").write_text(json.dumps(config))
        return tmp_path / "run"

    return write


@pytest.fixture(scope="session")
def s3_server() -> Iterator[object_store.S3Server]:
    """Start an S3 server for the session."""
    with object_store.S3Server() as server:
        yield server


@pytest.fixture
def store(
    s3_server: object_store.S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[object_store.S3Server]:
    """Point this process's S3 clients to the server, without faults."""
    for name, value in object_store.environment(s3_server.url).items():
        monkeypatch.setenv(name, value)
    yield s3_server
    s3_server.heal()

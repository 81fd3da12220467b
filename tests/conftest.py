import os
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests run wherever there is a CUDA device; elsewhere they are left out, not counted as passed."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def shared_folder() -> Path | None:
    """Real clips and reference values kept beside the repository, or None where there are none."""
    folder = Path(os.environ.get("ADAMAE_TEST_VIDEOS", Path(__file__).parents[2] / "shared"))
    return folder if folder.is_dir() else None

from pathlib import Path

import gpu
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the GPU that is not there, once."""
    if reason := gpu.why_not():
        pytest.skip(f"{reason}: no GPU can be pretended")
    return gpu.build(tmp_path_factory.mktemp("cuda"))

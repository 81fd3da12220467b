"""The stand-in for CUDA, built once."""

from pathlib import Path

import gpu
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in for CUDA (fake_cuda.cpp)."""
    reason = gpu.why_not()
    if reason:
        pytest.skip(f"{reason}: no GPU can be pretended")
    return gpu.build(tmp_path_factory.mktemp("cuda"))

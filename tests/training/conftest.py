"""Fixtures of the tests of training."""

from pathlib import Path

import pytest
from tiny import TINY


@pytest.fixture
def arguments(synthetic_shards: Path, tmp_path: Path) -> list[str]:
    """Return the command line of a run of six steps, which takes two seconds, in tmp_path/run."""
    return [*TINY, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]

"""Locks keep other processes and threads out, and are gone with whoever held them."""

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import Timeout

from adamae.common.errors import InputError
from adamae.common.locks import exclusive_lock, shared_lock


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with exclusive_lock(path), pytest.raises(Timeout), exclusive_lock(path, wait=False):
        pass
    with exclusive_lock(path, wait=False):
        pass


def test_shared_locks_keep_exclusive_ones_out(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with (
        shared_lock(path),
        shared_lock(path),
        pytest.raises(Timeout),
        exclusive_lock(path, wait=False),
    ):
        pass
    with exclusive_lock(path, wait=False):
        pass


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from adamae.common.locks import exclusive_lock\n"
    )
    program += "with exclusive_lock(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    path = tmp_path / ".lock"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == -9
    assert path.exists()
    with exclusive_lock(path, wait=False):
        pass


def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match="is a link"), exclusive_lock(tmp_path / ".lock"):
        pass
    with pytest.raises(InputError, match="is a link"):
        shared_lock(tmp_path / ".lock")
    assert (tmp_path / "victim").read_text() == "dear"

"""launch/torchrun.py exits as the rank that failed first."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import ROOT
from processes import wait_for

# What stands for train.py: its first argument says how it ends.
RANK = """
import os, signal, sys, time
if sys.argv[1] == "waits":
    open(sys.argv[2], "w").close()
    time.sleep(600)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    program = folder / "rank.py"
    program.write_text(RANK)
    launcher = [sys.executable, ROOT / "launch/torchrun.py", "--standalone", "--nproc-per-node=1"]
    return subprocess.Popen(
        [*launcher, program, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("2", 2), ("killed", 128 + signal.SIGKILL)])
def test_the_exit_code_is_the_ranks(end: str, code: int, tmp_path: Path) -> None:
    process = start(tmp_path, end)
    _, log = process.communicate(timeout=300)
    assert process.returncode == code, log


@pytest.mark.slow
def test_a_stop_that_was_asked_for_leaves_no_traceback(tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = start(tmp_path, "waits", started)
    assert wait_for(started.exists, 300)
    process.terminate()
    _, log = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in log

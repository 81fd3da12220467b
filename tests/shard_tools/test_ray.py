import os
import signal
import sys
import time
from pathlib import Path

import pytest
from shard_making import hashes, make

from common.errors import InputError
from shard_tools.workers.processes import Failed
from shard_tools.workers.ray_workers import RayPool


def test_without_ray_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="pip install ray"):
        RayPool(len, 1, 60)


def test_a_cluster_of_two_gives_the_same_bytes(videos: Path, dataset: Path, tmp_path: Path) -> None:
    make(videos, tmp_path / "out", "--samples-per-shard", "3", "--engine", "ray", "--workers", "2")
    assert hashes(tmp_path / "out") == hashes(dataset)


def test_crashes_and_hangs_on_a_cluster_cost_their_own_job_only() -> None:

    def act(job: str) -> str:  # in here, since the cluster's processes cannot import this file
        if job == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if job == "hang":
            time.sleep(1000)
        return job.upper()

    # Ray may take many seconds to see that a process has died.
    results = dict([*RayPool(act, 2, timeout=60).run(["a", "crash", "b"]), *RayPool(act, 2, timeout=5).run(["hang"])])
    assert results["crash"] == Failed("the process that worked on it died")
    assert results["hang"] == Failed("it took longer than 5 seconds")
    assert (results["a"], results["b"]) == ("A", "B")

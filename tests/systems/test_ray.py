"""make_shards.py on three real Ray nodes, of which one is killed: no video is lost or rejected."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import free_port, wait_for
from shard_making import hashes

from adamae.shard_tools import make_shards, synthetic_videos

NUM_VIDEOS = 48

pytestmark = [
    pytest.mark.timeout(2700),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is missing: pip install ray"),
]


@contextmanager
def start_node(name: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a node of one core in a session of its own, and kill it after the block."""
    # The command `ray` lies elsewhere if Ray belongs to another environment that this one uses.
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    command = [*ray, "start", *options, "--num-cpus=1", "--node-ip-address=127.0.0.1", "--block"]
    log_file = folder / f"{name}.log"
    with log_file.open("wb") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        assert wait_for(lambda: b"Ray runtime started" in log_file.read_bytes(), 300)
        yield node
    finally:
        kill(node)


def kill(node: subprocess.Popen[bytes]) -> None:
    """Kill a node with its raylet and workers, which are in its session."""
    session = os.getsid(node.pid) if node.poll() is None else node.pid
    subprocess.run(["pkill", "-KILL", "--session", str(session)], check=False)
    node.wait()


def make(videos: Path, output: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, make_shards.__file__, str(videos), str(output), *options]
    return subprocess.Popen([*command, "--samples-per-shard=8", "--preset=medium"])


def test_a_node_that_dies_costs_its_jobs_a_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = tmp_path / "videos"
    size = ["--size=256", "--num-frames=128"]
    synthetic_videos.main([str(videos), f"--num-videos={NUM_VIDEOS}", *size])
    assert make(videos, tmp_path / "one").wait(600) == 0
    # Otherwise nodes need a token that the head has made.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = free_port()
    join = f"--address=127.0.0.1:{port}"
    head = ("--head", f"--port={port}", "--include-dashboard=false")
    with (
        start_node("head", tmp_path, *head),
        start_node("second", tmp_path, join),
        start_node("third", tmp_path, join) as third,
    ):
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        process = make(videos, tmp_path / "many", "--engine=ray")
        work = tmp_path / "many/.work"
        assert wait_for(lambda: len(list(work.rglob("*.json"))) >= NUM_VIDEOS // 4, 600)
        assert process.poll() is None, "it ended before a node was killed"
        os.killpg(third.pid, signal.SIGKILL)
        kill(third)
        assert process.wait(600) == 0
    assert hashes(tmp_path / "many") == hashes(tmp_path / "one")
    assert not (tmp_path / "many/rejected.jsonl").read_text()

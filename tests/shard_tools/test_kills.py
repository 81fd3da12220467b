"""Killed at any moment, the same command resumes and ends with the bytes of a run that was not."""

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shard_making import hashes, list_segments, make, run_here

from shard_tools import make_shards
from shard_tools.workers import ENGINES

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
OPTIONS = {
    "copied": ["--encode", "copy", "--samples-per-shard", "2"],
    "segments": ["--samples-per-shard", "4", "--frame-stride", "3", "--preset", "ultrafast"],
    "in pieces": ["--samples-per-shard", "3", "--frame-stride", "3", "--clip-seconds", "0.3", "--preset", "ultrafast"],
}


def test_killed_with_its_workers_left_alone(workers: None, videos: Path, dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, make_shards.__file__, str(videos), str(tmp_path / "out")]
    command += ["--samples-per-shard", "3", "--workers", "2", "--max-rejects", "1"]
    # In the middle of the first shard, and after it.
    for moment in (".work/items/*/*.json", "shard-000000.tar"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any((tmp_path / "out").glob(moment)):
            time.sleep(0.01)
        assert process.poll() is None, f"the run ended before {moment} was seen"
        process.kill()  # the parent alone: its workers must notice by themselves
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


def run(killed_before: int, videos: Path, folder: Path, options: list[str]) -> bool:
    """Make shards in a fork; False if it died, which it does before change `killed_before` of the disk (0: never)."""
    child = os.fork()
    if child == 0:
        left = killed_before

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opens_to_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
            if event in CHANGES or opens_to_write:
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            ENGINES["processes"] = run_here
            make(videos, folder, *options)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


def kill_before_every_change(videos: Path, folder: Path, options: list[str]) -> int:
    """Return how many changes there are."""
    assert run(0, videos, folder / "whole", options)
    expected = hashes(folder / "whole")
    number = 1
    while not run(number, videos, folder / str(number), options):
        assert run(0, videos, folder / str(number), options)
        assert hashes(folder / str(number)) == expected, f"killed before change {number}"
        number += 1
    return number - 1


def kill_again_and_again(videos: Path, folder: Path, options: list[str]) -> None:
    assert run(0, videos, folder / "whole", options)
    for number in range(1, 60, 2):
        run(number, videos, folder / "out", options)
    assert run(0, videos, folder / "out", options)
    assert hashes(folder / "out") == hashes(folder / "whole")


def in_clean_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call it in a process that has not decoded yet: FFmpeg's threads are missing in forks of one that has."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos, a file that is none, and a list of segments of them all with several labels."""
    folder = tmp_path_factory.mktemp("few")
    for path in sorted(videos.rglob("*.mp4"))[:3]:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "text.mp4").write_text("no video")
    list_segments(folder, folder / "list.json")
    return folder


@pytest.mark.slow  # three minutes: two runs per change of the disk
@pytest.mark.parametrize("options", ["copied", "segments"])
def test_killed_before_any_change_of_the_disk(few: Path, tmp_path: Path, options: str) -> None:
    videos = few / "list.json" if options == "segments" else few
    assert in_clean_process(kill_before_every_change, videos, tmp_path, OPTIONS[options]) >= 30


@pytest.mark.parametrize("options", OPTIONS)
def test_killed_again_and_again(few: Path, tmp_path: Path, options: str) -> None:
    videos = few / "list.json" if options == "segments" else few
    in_clean_process(kill_again_and_again, videos, tmp_path, OPTIONS[options])

"""Killed at any moment, the same command goes on and ends with the bytes of a run that was not."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from shard_making import hashes, run_here

from pipeline.shards.format import read_dataset_info
from shard_tools.build import Build
from shard_tools.inputs import read_inputs
from shard_tools.output import LocalOutput
from shard_tools.settings import Settings
from shard_tools.work import process_job

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
COPIED = Settings(samples_per_shard=2, encode="copy")
IN_PIECES = Settings(samples_per_shard=3, frame_stride=3, max_seconds=0.3, preset="ultrafast")


def make(videos: Path, folder: Path, settings: Settings) -> None:
    items = read_inputs(str(videos), None, unlabelled=False)
    build = Build(LocalOutput(folder), settings)
    with build.lock():
        while (plan := build.plan(items, [], retry_rejects=False)) is not None:
            build.run(plan, items, partial(run_here, process_job), lambda outcome: None)
            assert build.finish(plan) is None


def ended(killed_before: int, videos: Path, folder: Path, settings: Settings) -> bool:
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
            make(videos, folder, settings)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


def killed_before_every_change(videos: Path, folder: Path, settings: Settings) -> int:
    """How many changes there are."""
    assert ended(0, videos, folder / "whole", settings)
    expected = hashes(folder / "whole")
    number = 1
    while not ended(number, videos, folder / str(number), settings):
        assert ended(0, videos, folder / str(number), settings)
        assert hashes(folder / str(number)) == expected, f"killed before change {number}"
        number += 1
    return number - 1


def killed_again_and_again(videos: Path, folder: Path, settings: Settings) -> None:
    assert ended(0, videos, folder / "whole", settings)
    for number in range(1, 60):
        ended(number, videos, folder / "out", settings)
    assert ended(0, videos, folder / "out", settings)
    assert hashes(folder / "out") == hashes(folder / "whole")


def in_clean_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Its result, from a process that has not decoded yet: FFmpeg's threads are missing in forks of one that has."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos and one that is none."""
    folder = tmp_path_factory.mktemp("few")
    for path in sorted(videos.rglob("*.mp4"))[:3]:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "text.mp4").write_text("no video")
    return folder


@pytest.mark.slow  # 30 s: two runs per change of the disk
@pytest.mark.parametrize("settings", [COPIED, IN_PIECES], ids=["copied", "in pieces"])
def test_killed_before_any_change_of_the_disk(few: Path, tmp_path: Path, settings: Settings) -> None:
    assert in_clean_process(killed_before_every_change, few, tmp_path, settings) >= 30
    assert read_dataset_info(tmp_path / "whole").num_samples == (3 if settings is COPIED else 6)


@pytest.mark.parametrize("settings", [COPIED, IN_PIECES], ids=["copied", "in pieces"])
def test_killed_again_and_again(few: Path, tmp_path: Path, settings: Settings) -> None:
    in_clean_process(killed_again_and_again, few, tmp_path, settings)

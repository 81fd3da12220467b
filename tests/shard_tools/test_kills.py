"""Killed at any moment, the same command goes on and ends with the bytes of a run that was not."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shard_making import hashes

from pipeline.shards import read_dataset_info
from shard_tools.build import Build
from shard_tools.inputs import read_inputs
from shard_tools.settings import Settings
from shard_tools.work import Job, work

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
COPIED = Settings(samples_per_shard=2, encode="copy")
IN_PIECES = Settings(samples_per_shard=3, frame_stride=3, max_seconds=0.3, preset="ultrafast")


class Here:
    """A runner that works in this process."""

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]:
        return ((job, work(job)) for job in jobs)


def make(videos: Path, folder: Path, settings: Settings) -> None:
    items = read_inputs(str(videos), None, unlabelled=False)
    build = Build(folder, settings)
    with build.locked():
        while (plan := build.plan(items, [], retry_rejects=False)) is not None:
            build.run(plan, items, Here(), lambda outcome: None)
            assert build.finish(plan)


def killed_before_change(number: int, videos: Path, folder: Path, settings: Settings) -> bool:
    """Run until the process would change the file system for the `number`-th time; False if it ends before that."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opens_to_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
            if event in CHANGES or opens_to_write:
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)
        make(videos, folder, settings)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos and one that is none."""
    folder = tmp_path_factory.mktemp("few")
    for path in sorted(videos.rglob("*.mp4"))[:3]:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "text.mp4").write_text("no video")
    return folder


@pytest.mark.parametrize("settings", [COPIED, IN_PIECES], ids=["copied", "in pieces"])
def test_killed_before_any_change_of_the_disk(few: Path, tmp_path: Path, settings: Settings) -> None:
    make(few, tmp_path / "whole", settings)
    expected = hashes(tmp_path / "whole")
    assert read_dataset_info(tmp_path / "whole").num_samples == (3 if settings is COPIED else 6)
    number = 1
    while killed_before_change(number, few, tmp_path / str(number), settings):
        make(few, tmp_path / str(number), settings)
        assert hashes(tmp_path / str(number)) == expected, f"killed before change {number}"
        number += 1
    assert number > 30


@pytest.mark.parametrize("settings", [COPIED, IN_PIECES], ids=["copied", "in pieces"])
def test_killed_again_and_again(few: Path, tmp_path: Path, settings: Settings) -> None:
    make(few, tmp_path / "whole", settings)
    for number in range(1, 60):
        killed_before_change(number, few, tmp_path / "out", settings)
    make(few, tmp_path / "out", settings)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")

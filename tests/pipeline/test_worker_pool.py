"""Workers that die, hang or are stopped cost no clip, and leave nothing behind."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from loading import (
    CPU,
    check_first,
    check_frames,
    first_batches,
    list_workers,
    open_loader,
    plan_of,
)
from made_videos import encode, write_shards
from processes import is_alive, list_descendants, take_interrupts, wait_for

from adamae.common.errors import InputError
from adamae.pipeline import worker_pool
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.decode_worker import DecodeWorker
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.shards.dataset import ShardDataset

CONFIG = DataConfig(frame_stride=1, num_workers=2, max_bad_fraction=0.9)
Interpreter = Callable[[str], Path]


@pytest.fixture
def stuck(tmp_path: Path) -> ShardDataset:
    """Make 8 videos, of which v03 is in a shard that is a pipe: whoever reads it waits forever."""
    videos = [(f"v{i:02d}", encode(20, first=i)) for i in range(8)]
    dataset = ShardDataset.open(write_shards(tmp_path / "stuck", videos, per_shard=1))
    pipe = Path(dataset.shards[3])
    pipe.unlink()
    os.mkfifo(pipe)
    return dataset


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """Return a function that makes workers begin with a line of shell."""
    file = tmp_path / "python/python"
    file.parent.mkdir()

    def install(line: str) -> Path:
        file.write_text(f'#!/bin/sh\n{line}\nexec {sys.executable} "$@"\n')
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return file.parent

    return install


def kill_sleepers(ended: threading.Event) -> None:
    """Kill every worker that sleeps for a second without using the CPU: it reads the pipe."""
    naps: Counter[tuple[int, ...]] = Counter()
    while not ended.wait(0.05):
        # A worker may have ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            for worker in list_workers():
                # The fields behind the program's name, which is in parentheses: proc(5).
                fields = Path(f"/proc/{worker}/stat").read_text().rsplit(") ", 1)[1].split()
                state, user_time, system_time = fields[0], int(fields[11]), int(fields[12])
                if state == "S":
                    nap = worker, user_time, system_time
                    naps[nap] += 1
                    if naps[nap] > 20:
                        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    ("threads", "is_killed", "reason"),
    [
        (1, False, "reading and decoding took more than 2 s"),
        (2, False, "reading and decoding took more than 2 s"),
        (1, True, "the process that decoded it was ended by SIGKILL"),
    ],
)
def test_a_video_at_which_workers_hang_or_die_is_replaced(
    stuck: ShardDataset, tmp_path: Path, threads: int, is_killed: bool, reason: str
) -> None:
    """The other videos of its chunk are decoded once more, by themselves."""
    config = replace(CONFIG, num_workers=threads, decode_timeout_s=60.0 if is_killed else 2.0)
    report = tmp_path / "quarantine.jsonl"
    ended = threading.Event()
    killer = threading.Thread(target=kill_sleepers, args=(ended,))
    if is_killed:
        killer.start()
    with open_loader(stuck, config, report) as (plan, loader):
        try:
            batches = list(islice(loader.batches(0), 5))
        finally:
            ended.set()
        assert (loader.counters["timeouts"] == 0) == is_killed
    assert check_frames(batches, plan, stuck, bad={"v03"}) > 0
    (line,) = map(json.loads, report.read_text().splitlines())
    assert (line["key"], line["reason"]) == ("v03", reason)


def test_no_intact_video_is_blamed_for_workers_that_are_killed(
    short: ShardDataset, tmp_path: Path
) -> None:
    """Also with one video a chunk."""
    for prefetch in (1, 4):
        report = tmp_path / "quarantine.jsonl"
        with open_loader(short, replace(CONFIG, prefetch=prefetch), report) as (plan, loader):
            for number, batch in enumerate(islice(loader.batches(0), 12)):
                check_frames([batch], plan, short, first=number)
                # One of them, then both.
                if number in (1, 6):
                    for worker in list_workers()[: 1 + number // 6]:
                        os.kill(worker, signal.SIGKILL)
            assert loader.counters["bad_clips"] == 0
        assert not report.exists()


def test_results_that_wait_while_nobody_asks_are_no_silence(
    short: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + pause_s)
    monkeypatch.setattr(worker_pool, "time", clock)
    with open_loader(short, replace(CONFIG, decode_timeout_s=60.0)) as (plan, loader):
        batches = loader.batches(0)
        first = next(batches)
        workers = list_workers()
        # As long as an evaluation might take, and longer than the time-out.
        pause_s = 100.0
        check_frames([first, *islice(batches, 4)], plan, short)
        assert list_workers() == workers


def test_a_signal_to_the_whole_job_ends_no_worker(short: ShardDataset) -> None:
    with open_loader(short, CONFIG) as (plan, loader):
        batches = loader.batches(0)
        first = next(batches)
        workers = list_workers()
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            for worker in workers:
                os.kill(worker, number)
        check_frames([first, *islice(batches, 5)], plan, short)
        assert list_workers() == workers


@pytest.mark.parametrize(
    ("death", "end"), [("exit 1", "ended with exit code 1"), ("kill -9 $$", "was ended by SIGKILL")]
)
def test_workers_that_cannot_start_are_an_error(
    short: ShardDataset, interpreter: Interpreter, death: str, end: str
) -> None:
    interpreter(death)
    message = rf"{end} before it was ready, 3 times: .*lower data\.num_workers"
    with pytest.raises(InputError, match=message):
        first_batches(short, CONFIG, 1)


def test_a_worker_that_is_killed_while_it_starts_is_started_again(
    short: ShardDataset, interpreter: Interpreter
) -> None:
    # The first two starts, of any worker, kill themselves.
    folder = interpreter('for n in 1 2; do mkdir "$0.$n" 2>/dev/null && kill -9 $$; done')
    assert check_first(short, CONFIG, 4)["bad_clips"] == 0
    assert len(list(folder.iterdir())) == 3, "no start was interrupted"


def test_what_keeps_a_worker_from_working_is_the_error(short_shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(short_shards, tmp_path / "shards")
    dataset = ShardDataset.open(folder)
    for shard in folder.glob("*.tar"):
        shard.unlink()
    with pytest.raises(InputError, match="tar is missing: run"):
        first_batches(dataset, CONFIG, 1)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="there is no such folder"):
        first_batches(dataset, CONFIG, 1)


def test_datasets_of_a_mix_are_opened_again(short: ShardDataset, vp9: ShardDataset) -> None:
    config = replace(CONFIG, shards=[short.folder, vp9.folder], weights=[1, 3])
    check_first(ShardDataset.open(config), config, 4)


def test_memory_is_used_again_but_not_while_clips_are(short: ShardDataset) -> None:
    with open_loader(short, CONFIG) as (plan, loader):
        for first in (7, 2):
            check_frames(list(islice(loader.batches(first), 24)), plan, short, first)
        blocks = os.fstat(loader.memory.fileno()).st_size // loader.memory.block_bytes
        assert blocks <= 24 + CONFIG.prefetch + 1
        for batch in islice(loader.batches(0), 24):
            del batch
        assert os.fstat(loader.memory.fileno()).st_size // loader.memory.block_bytes == blocks


def test_closing_leaves_no_process_and_no_file(short: ShardDataset) -> None:
    # Looking at a sample opens a file that stays open.
    assert short.samples[0].key == "v00"
    # What other tests have left.
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for count in (0, 3):
        loader = ClipLoader(short, plan_of(short, CONFIG), CPU, CONFIG, None)
        batches = list(islice(loader.batches(0), count))
        workers = list_workers()
        assert len(workers) == (CONFIG.workers if count else 0)
        for _ in range(2):
            loader.close()
        assert wait_for(lambda pids=workers: not any(map(is_alive, pids)), 60)
        check_frames(batches, plan_of(short, CONFIG), short)
    del batches
    gc.collect()
    # Threads that other tests have left may close files, and open some for a moment.
    assert wait_for(lambda: set(os.listdir("/proc/self/fd")) <= before, 60)


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from test_worker_pool import *
dataset = ShardDataset.open({shards!r})
config = replace(CONFIG, decoder={decoder!r})
loader = ClipLoader(dataset, plan_of(dataset, config), CPU, config, None)
next(loader.batches(0))
print(flush=True)
sys.exit(len(sys.stdin.readline()))
"""


@pytest.mark.parametrize(
    ("ending", "decoder"),
    [
        ("leave", "dali"),
        ("SIGINT", "dali"),
        ("SIGTERM", "pyav"),
        ("SIGKILL", "pyav"),
        ("SIGKILL, one stopped", "pyav"),
    ],
)
def test_nothing_is_left_behind_however_the_program_ends(
    vp9: ShardDataset, ending: str, decoder: str
) -> None:
    program_text = PROGRAM.format(path=sys.path, shards=vp9.folder, decoder=decoder)
    with subprocess.Popen(
        [sys.executable, "-c", program_text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_interrupts,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "\n"
        workers = list_descendants(program.pid)
        assert len(workers) == CONFIG.workers
        maps = Path(f"/proc/{program.pid}/maps").read_text()
        assert "/dev/shm" not in maps, "no shared memory that has a name"
        if "stopped" in ending:
            os.kill(workers[0], signal.SIGSTOP)
        if ending == "leave":
            # It exits with the length of the line.
            _, errors = program.communicate("123456\n", timeout=120)
            assert program.returncode == 7
        else:
            program.send_signal(signal.Signals[ending.split(",")[0]])
            _, errors = program.communicate(timeout=120)
            assert program.returncode in {1, *(-number for number in signal.Signals)}
        assert "terminate called" not in errors
        assert "core dumped" not in errors
    assert wait_for(lambda: not any(map(is_alive, workers)), 60)


def test_what_a_worker_imports_is_not_pytorch() -> None:
    """It would take a second and 200 MiB in each."""
    program = f"import sys; import {DecodeWorker.__module__}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)

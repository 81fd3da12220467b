"""Runs of several ranks: signals, kills, and ranks that are frozen or lost."""

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torchrun
from processes import is_alive, send, wait_for
from runs import is_same, load_weights, read_rows, saved_steps

from adamae.train import train
from adamae.training.config import parse

# Steps so slow that a test can act between two of them.
SLOW_S = 0.3
# What has not happened by then never will.
LIMIT_S = 240


@pytest.fixture
def arguments(arguments: list[str]) -> list[str]:
    """Return the command line of a run of any number of ranks, up to four."""
    return [*arguments, "batch_size=1", "global_batch=4"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def wait_for_steps(run: Path) -> None:
    """Wait until a run has logged two steps."""
    assert wait_for(lambda: len(read_rows(run)) >= 2, LIMIT_S)


def test_two_ranks_stop_after_the_same_step_and_resume_bit_by_bit(
    arguments: list[str], log: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    torchrun.run([*arguments, "checkpoint_minutes=1e-6", "keep_checkpoints=9"], log)
    # Both ranks save when the clock of the main rank says so.
    assert saved_steps(run) == [1, 2, 3, 4, 5, 6]
    whole = load_weights(run)
    shutil.rmtree(run)
    released = tmp_path / "released"
    held = partial(torchrun.hold, run, 2, released)
    with torchrun.Job([*arguments, "checkpoint_every=100"], log, before=held) as job:
        wait_for_steps(run)
        # One of the ranks alone is signaled.
        os.kill(job.workers()[1], signal.SIGTERM)
        released.touch()
        assert job.gone(LIMIT_S), job.said()
    assert saved_steps(run) == [len(read_rows(run))]
    assert 2 <= len(read_rows(run)) < 6, "too late to prove anything"
    torchrun.run(arguments, log)
    assert is_same(load_weights(run), whole)


@pytest.mark.slow
def test_four_ranks_resume_bit_by_bit_however_they_are_spread_over_nodes(
    arguments: list[str], log: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    torchrun.run(arguments, log, per_node=4)
    whole = load_weights(run)
    shutil.rmtree(run / "checkpoints/step-00000006")
    torchrun.run(arguments, log, nodes=2, per_node=2)
    assert is_same(load_weights(run), whole)


@pytest.mark.slow
def test_after_kills_at_random_moments_two_ranks_end_with_the_same_weights(
    arguments: list[str], log: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    dice = random.Random(0)
    torchrun.run(arguments, log)
    whole = load_weights(run)
    shutil.rmtree(run)
    kills = 0
    for _ in range(20):
        slowed = partial(torchrun.slow_down, 0.1)
        with torchrun.Job([*arguments, "checkpoint_every=1"], log, before=slowed) as job:
            num_steps = len(read_rows(run))
            wait_for(lambda num=num_steps: len(read_rows(run)) > num or job.is_over(), LIMIT_S)
            time.sleep(dice.uniform(0, 0.3))
            if job.is_over():
                break
            send(job.workers().values(), signal.SIGKILL)
            kills += 1
    assert kills > 1
    torchrun.run(arguments, log)
    assert is_same(load_weights(run), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"), [(2, ["global_batch=null", "batch_size=2"]), (3, ["batch_size=2"])]
)
def test_a_run_resumes_with_any_number_of_ranks(
    arguments: list[str], log: Path, tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    """It resumes with more of them, and then with one again."""
    checkpoints = tmp_path / "run/checkpoints"
    arguments = [*arguments, "checkpoint_every=2"]
    alone = parse([*arguments, "global_batch=null", "batch_size=4"])
    train(alone)
    rows = read_rows(tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
    torchrun.run([*arguments, *overrides], log, per_node=ranks)
    shutil.rmtree(checkpoints / "step-00000006")
    train(alone)
    # Steps are of the same four clips, whose sums are rounded in another order.
    for one, several in zip(rows, read_rows(tmp_path / "run"), strict=True):
        for name in ("loss", "grad_norm"):
            assert several[name] == pytest.approx(one[name], rel=1e-4), one["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGKILL]
)
def test_whatever_signal_ends_a_run_it_has_saved_its_last_step(
    arguments: list[str], log: Path, tmp_path: Path, number: signal.Signals
) -> None:
    # A scheduler signals all processes; a terminal, or the kernel, torchrun alone.
    to_all = number in (signal.SIGTERM, signal.SIGUSR1)
    with torchrun.Job(
        [*arguments, "steps=1000"], log, before=partial(torchrun.slow_down, SLOW_S)
    ) as job:
        wait_for_steps(tmp_path / "run")
        send(job.processes() if to_all else [job.agents[0].pid], number)
        assert job.gone(LIMIT_S), job.said()
        assert saved_steps(tmp_path / "run")[-1] == len(read_rows(tmp_path / "run")), job.said()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_does_not_answer_is_named(
    arguments: list[str], log: Path, tmp_path: Path, number: signal.Signals
) -> None:
    # On a busy machine, ranks start seconds apart, and wait for each other.
    with torchrun.Job([*arguments, "steps=1000", "timeout_s=10"], log) as job:
        wait_for_steps(tmp_path / "run")
        os.kill(job.workers()[1], number)
        assert wait_for(lambda: not is_alive(job.workers()[0]), LIMIT_S), job.said()
        assert f"error: rank 1 on {os.uname().nodename} does not answer" in job.said()


# Slow, as it waits longer than for a rank that does not answer.
@pytest.mark.slow
def test_the_others_wait_for_the_rank_that_writes_the_end_of_a_run(
    arguments: list[str], log: Path
) -> None:
    late = partial(torchrun.leave_late, 15)
    with torchrun.Job([*arguments, "timeout_s=10"], log, before=late) as job:
        assert job.wait() == [0], job.said()


def test_of_several_ranks_the_one_that_failed_has_the_last_word(
    arguments: list[str], log: Path
) -> None:
    with torchrun.Job([*arguments, "task=finetune", "batch_size=3"], log) as job:
        assert job.wait() == [1]
        root_cause = job.said().partition("Root Cause")[2]
    assert "error: batch_size is 3, and mixup and cutmix mix clips in pairs" in root_cause


def test_nodes_that_do_not_share_the_run_directory_are_noticed(
    arguments: list[str], log: Path, tmp_path: Path, tiny_run: Path
) -> None:
    shutil.copytree(tiny_run, tmp_path / "0/run")
    shutil.rmtree(tmp_path / "0/run/checkpoints/step-00000006")
    (tmp_path / "1").mkdir()
    arguments = [*arguments, "run=run", "global_batch=null", "batch_size=2"]
    with torchrun.Job(arguments, log, before=partial(torchrun.enter_own_folder, tmp_path)) as job:
        assert job.wait() == [1]
        assert "error: the ranks of this run find different checkpoints in run" in job.said()
    assert saved_steps(tmp_path / "0/run") == [3], "it has trained"

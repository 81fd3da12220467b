"""launch/slurm.sbatch on a real Slurm: a run that is stopped or preempted ends as others do."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import send, wait_for
from runs import is_same, load_weights, read_rows
from slurm import Slurm, missing_programs, start_slurm
from tiny import TINY

ROOT = Path(__file__).parents[2]
STEPS = 150
# Steps after which something happens.
HALFWAY = 40
# As long may a job take on two busy cores, where a rank may start minutes after another one.
ENDS_WITHIN_S = 800.0
MEET_WITHIN_S = 300

pytestmark = [
    pytest.mark.timeout(2700),
    pytest.mark.skipif(missing_programs() != "", reason=missing_programs()),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with start_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(
    slurm: Slurm, run: Path, shards: Path, *options: str, python: Path = Path(sys.executable)
) -> str:
    """Submit a run of two ranks on each of two nodes, and return the job's number."""
    keys = [*TINY, f"data.shards={shards}", f"run={run}", f"steps={STEPS}"]
    keys += [
        f"timeout_s={MEET_WITHIN_S}",
        "checkpoint_every=1000",
        "batch_size=2",
        "global_batch=8",
        "data.prefetch=1",
    ]
    resources = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", "--mem=0", "--time=15"]
    return slurm.call(
        "sbatch",
        "--parsable",
        f"--chdir={ROOT}",
        f"--output={run}-%j.log",
        *resources,
        *options,
        str(ROOT / "launch/slurm.sbatch"),
        *keys,
        RANKS_PER_NODE="2",
        PATH=f"{python.parent}:{slurm.environment['PATH']}",
    )


def reach(run: Path, step: int) -> None:
    assert wait_for(lambda: len(read_rows(run)) >= step, ENDS_WITHIN_S)


@contextmanager
def frozen(run: Path) -> Iterator[None]:
    """Freeze the ranks of a run, which might end before Slurm acts: it schedules every 5 s."""
    pattern = f"^python train.py .*run={run} "
    listed = subprocess.check_output(["pgrep", "--full", pattern], text=True)
    ranks = [int(pid) for pid in listed.split()]
    send(ranks, signal.SIGSTOP)
    yield
    send(ranks, signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, synthetic_shards: Path) -> Path:
    run = slurm.folder / "undisturbed"
    job = slurm.wait(submit(slurm, run, synthetic_shards), ENDS_WITHIN_S)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    return run


def assert_same(run: Path, reference: Path) -> None:
    assert [row["loss"] for row in read_rows(run)] == [row["loss"] for row in read_rows(reference)]
    assert is_same(load_weights(run, STEPS), load_weights(reference, STEPS))


def test_a_preemption_with_a_grace_time_requeues(
    slurm: Slurm, synthetic_shards: Path, undisturbed: Path
) -> None:
    run = slurm.folder / "preempted"
    job = submit(slurm, run, synthetic_shards)
    reach(run, HALFWAY)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--time=2", "--output=/dev/null"]
    with frozen(run):
        slurm.call("sbatch", *urgent, "--wrap=sleep 5")
        assert wait_for(lambda: slurm.describe(job)["PreemptTime"] != "None", 120)
    ended = slurm.wait(job, ENDS_WITHIN_S)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert_same(run, undisturbed)


def test_what_was_stopped_by_hand_is_resumed_by_hand(
    slurm: Slurm, synthetic_shards: Path, undisturbed: Path
) -> None:
    run = slurm.folder / "stopped"
    job = submit(slurm, run, synthetic_shards)
    reach(run, HALFWAY)
    slurm.call("scancel", "--signal=TERM", job)
    ended = slurm.wait(job, ENDS_WITHIN_S)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0")
    assert slurm.wait(submit(slurm, run, synthetic_shards), ENDS_WITHIN_S)["ExitCode"] == "0:0"
    assert_same(run, undisturbed)


# Stands for a rank that is still starting when it is signaled.
STARTING = """#!/bin/sh
trap 'exit 130' TERM
for second in $(seq 600); do sleep 1; done
"""


def test_a_time_limit_before_the_first_step_is_said(
    slurm: Slurm, synthetic_shards: Path, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(STARTING)
    program.chmod(0o755)
    run = slurm.folder / "short"
    # Slurm signals 20 to 50 s after the start: it looks every 30 s. Before, the script would not
    # be ready.
    options = ["--time=2", "--signal=B:USR1@70"]
    job = submit(slurm, run, synthetic_shards, *options, python=program)
    ended = slurm.wait(job, ENDS_WITHIN_S)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert "raise --time" in Path(f"{run}-{job}.log").read_text(errors="replace")

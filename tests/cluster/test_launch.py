"""launch/: the files are valid, and the commands in them train, stop and resume."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from faults import ROOT, SETTINGS
from runs import read_rows, saved_steps
from torchrun import free_port, wait_for

from training.config import parse

LAUNCH = ROOT / "launch"
STEPS = 40

FAKES = {
    "scontrol": 'case $1 in show) echo 127.0.0.1; echo 127.0.0.1;; requeue) echo "$2" >> "$FAKES/requeued";; esac',
    # As on a cluster, all processes of the steps are signalled: torchruns and their workers.
    "scancel": 'for task in $(cat "$FAKES/tasks"); do kill -TERM $task $(ps -o pid= --ppid $task); done',
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for ((node = 0; node < SLURM_NNODES; node++)); do
            SLURM_NODEID=$node "$@" & echo $! >> "$FAKES/tasks"
        done
        code=0
        for task in $(cat "$FAKES/tasks"); do wait $task || code=$?; done
        exit $code""",
}


def kubernetes() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())


def skypilot() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


class Launched:
    """One of the commands at work, in a process group of its own."""

    def __init__(self, command: list[str], run: Path, log: Path, **environment: str) -> None:
        self._run, self._log = run, log
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        everything = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment}
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                command, stdout=said, stderr=said, env=everything, cwd=ROOT, start_new_session=True
            )

    def stop_at(self, step: int, number: int) -> int:
        """Signal the launched process when this step is over; its exit code."""
        assert wait_for(lambda: len(read_rows(self._run)) >= step or self.process.poll() is not None, 200)
        assert self.process.poll() is None, self._log.read_text()
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        try:
            return self.process.wait(200)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_slurm_kubernetes_and_skypilot_resume_where_each_other_was_stopped(
    tmp_path: Path, synthetic_shards: Path
) -> None:
    run = tmp_path / "run"
    settings = [*SETTINGS, f"data.shards={synthetic_shards}", f"run={run}", f"steps={STEPS}", "checkpoint_every=1000"]

    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name, script in FAKES.items():
        (fakes / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (fakes / name).chmod(0o755)
    port = str(free_port() % 20_000)
    slurm = Launched(
        ["bash", str(LAUNCH / "slurm.sbatch"), *settings, "batch_size=4"], run, tmp_path / "slurm.log",
        PATH=f"{fakes}:{Path(sys.executable).parent}:{os.environ['PATH']}", FAKES=str(fakes),
        SLURM_JOB_ID=port, SLURM_JOB_NODELIST="two nodes", SLURM_NNODES="1", SLURM_CPUS_PER_TASK="2",
    )  # fmt: skip
    assert slurm.stop_at(2, signal.SIGUSR1) != 0
    assert (fakes / "requeued").read_text().split() == [port]
    by_slurm = saved_steps(run)[-1]
    assert 2 <= by_slurm < STEPS, (tmp_path / "slurm.log").read_text()

    container = kubernetes()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["NODES"] == "2"
    alone = {"NODES": "1", "PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "JOB_COMPLETION_INDEX": "0"}
    command = [part.replace("29500", str(free_port())) for part in container["command"]]
    pod = Launched([*command, *settings, "batch_size=4"], run, tmp_path / "kubernetes.log", **{**variables, **alone})
    assert pod.stop_at(by_slurm + 2, signal.SIGTERM) != 0
    by_kubernetes = saved_steps(run)[-1]
    assert by_slurm < by_kubernetes < STEPS, (tmp_path / "kubernetes.log").read_text()

    task = skypilot()
    variables = {name: value or "" for name, value in task["envs"].items()}
    config = tmp_path / "config.yaml"
    shutil.copy(run / "config.yaml", config)
    given = {"CONFIG": str(config), "SHARDS": str(synthetic_shards), "RUN": str(run), "PYTHON": sys.executable}
    machines = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    script = task["run"].replace("29500", str(free_port()))
    sky = Launched(
        ["bash", "-c", script], run, tmp_path / "sky.log", **{**variables, **given, "MORE": "batch_size=4", **machines}
    )
    assert sky.end() == 0, (tmp_path / "sky.log").read_text()
    assert saved_steps(run)[-1] == STEPS
    assert [row["step"] for row in read_rows(run)] == list(range(1, STEPS + 1))


def test_slurm_is_asked_for_nothing_it_does_not_know() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=True)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH")
    )
    assert options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("B:USR1@")
    assert "requeue" in options
    assert text.index("#SBATCH --signal") < text.index("set -uo"), "sbatch reads no options behind the first command"


def test_kubernetes_knows_all_fields_of_the_jobs() -> None:
    """The JobSet's own definition is no part of Kubernetes; the Job in it is."""
    jobset = kubernetes()
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **replicated["template"]}
    kubernetes_validate.validate(job, "1.31", strict=True)
    spec = job["spec"]
    container = spec["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["NODES"]) == spec["parallelism"] == spec["completions"]
    assert variables["PROCESSES"] == container["resources"]["limits"]["nvidia.com/gpu"]
    name, job_name = jobset["metadata"]["name"], replicated["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{job_name}-0-0.{name}"


@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml", "kubernetes.yaml"])
def test_three_commands_stand_on_top(name: str) -> None:
    head = (LAUNCH / name).read_text().split("\n\n")[0]
    assert len([line for line in head.splitlines() if line.startswith("#   ")]) == 3


def test_the_configurations_named_exist() -> None:
    args = kubernetes()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    for config in (args[1], skypilot()["envs"]["CONFIG"]):
        assert parse([f"--config={ROOT / config}", "data.shards=somewhere"])
    keys = [arg for arg in args[2:] if not arg.startswith("run=")]
    assert parse([f"--config={ROOT / args[1]}", *keys])

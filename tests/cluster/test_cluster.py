"""launch/: files are valid, their commands train, stop and resume, and a run survives a fault."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from faults import CHECKPOINT_EVERY, ROOT, SETTINGS, inject_all, make_shards, make_site
from processes import wait_for
from runs import read_rows, saved_steps
from torchrun import free_port

from adamae.training.config import parse

LAUNCH = ROOT / "launch"
STEPS = 40

# Slurm's commands, for two nodes that are this machine.
FAKES = {
    "scontrol": """
        case $1 in
            show) echo 127.0.0.1; echo 127.0.0.1;;
            requeue) echo "$2" >> "$FAKES/requeued";;
        esac""",
    # As on a cluster, all processes of the steps are signaled: torchruns and their workers.
    "scancel": """
        for task in $(cat "$FAKES/tasks"); do
            kill -TERM $task $(ps -o pid= --ppid $task)
        done""",
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for ((node = 0; node < SLURM_NNODES; node++)); do
            SLURM_NODEID=$node "$@" & echo $! >> "$FAKES/tasks"
        done
        code=0
        for task in $(cat "$FAKES/tasks"); do wait $task || code=$?; done
        exit $code""",
}


KUBERNETES = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
SKYPILOT = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
(REPLICATED_JOB,) = KUBERNETES["spec"]["replicatedJobs"]
POD = REPLICATED_JOB["template"]["spec"]["template"]["spec"]["containers"][0]
POD_VARIABLES = {variable["name"]: variable.get("value", "") for variable in POD["env"]}


@dataclass
class Command:
    """One of the commands in launch/, with its environment."""

    arguments: list[str]
    environment: dict[str, str]
    run: Path
    log: Path

    def launch(self, stop_at: int = 0, signal_number: int = 0) -> int:
        """Return the exit code; a signal is sent after the step `stop_at`, if it is not 0."""
        fakes = self.environment.get("FAKES", "")
        path = f"{fakes}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **self.environment}
        process = subprocess.Popen(
            self.arguments,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

        def has_stepped_or_ended() -> bool:
            return len(read_rows(self.run)) >= stop_at or process.poll() is not None

        try:
            if stop_at:
                assert wait_for(has_stepped_or_ended, 200)
                assert process.poll() is None, self.log.read_text()
                process.send_signal(signal_number)
            return process.wait(200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_slurm_kubernetes_and_skypilot_resume_where_each_other_was_stopped(
    tmp_path: Path, synthetic_shards: Path
) -> None:
    run = tmp_path / "run"
    settings = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={run}",
        f"steps={STEPS}",
        "checkpoint_every=1000",
    ]

    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name, script in FAKES.items():
        (fakes / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (fakes / name).chmod(0o755)
    port = str(free_port() % 20_000)
    job = {
        "SLURM_JOB_ID": port,
        "SLURM_JOB_NODELIST": "two nodes",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "FAKES": str(fakes),
    }
    arguments = ["bash", str(LAUNCH / "slurm.sbatch"), *settings, "batch_size=4"]
    slurm = Command(arguments, job, run, tmp_path / "slurm.log")
    assert slurm.launch(2, signal.SIGUSR1) != 0
    assert (fakes / "requeued").read_text().split() == [port]
    by_slurm = saved_steps(run)[-1]
    assert 2 <= by_slurm < STEPS, slurm.log.read_text()

    alone = {"NODES": "1", "PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"}
    arguments = [part.replace("29500", str(free_port())) for part in POD["command"]]
    arguments += [*settings, "batch_size=4"]
    kubernetes = Command(arguments, {**POD_VARIABLES, **alone}, run, tmp_path / "kubernetes.log")
    assert kubernetes.launch(by_slurm + 2, signal.SIGTERM) != 0
    by_kubernetes = saved_steps(run)[-1]
    assert by_slurm < by_kubernetes < STEPS, kubernetes.log.read_text()

    config = tmp_path / "config.yaml"
    shutil.copy(run / "config.yaml", config)
    variables = {name: value or "" for name, value in SKYPILOT["envs"].items()}
    variables |= {
        "CONFIG": str(config),
        "SHARDS": str(synthetic_shards),
        "RUN": str(run),
        "PYTHON": sys.executable,
        "MORE": "batch_size=4",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
    }
    arguments = ["bash", "-c", SKYPILOT["run"].replace("29500", str(free_port()))]
    sky = Command(arguments, variables, run, tmp_path / "sky.log")
    assert sky.launch() == 0, sky.log.read_text()
    assert saved_steps(run)[-1] == STEPS
    assert [row["step"] for row in read_rows(run)] == list(range(1, STEPS + 1))


def test_slurm_warns_the_script_and_may_requeue_it() -> None:
    # sbatch reads no option behind the first command.
    options, _, _ = (LAUNCH / "slurm.sbatch").read_text().partition("set -uo")
    for option in ("--ntasks-per-node=1", "--signal=B:USR1@", "--requeue"):
        assert f"\n#SBATCH {option}" in options


def test_kubernetes_knows_all_fields_of_the_jobs() -> None:
    """The JobSet's own definition is no part of Kubernetes; the Job in it is."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "node"},
        **REPLICATED_JOB["template"],
    }
    kubernetes_validate.validate(job, "1.31", strict=True)
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 1, "a job per node"
    labels = {variable["name"]: variable.get("valueFrom") for variable in POD["env"]}
    assert "replicatedjob-replicas" in labels["NODES"]["fieldRef"]["fieldPath"]
    assert "job-index" in labels["NODE_RANK"]["fieldRef"]["fieldPath"]
    settings = KUBERNETES["metadata"]["annotations"]
    assert settings["adamae/image"] == POD["image"]
    assert all(type(value) is str for value in settings.values()), "as annotations are"
    assert POD_VARIABLES["PROCESSES"] == POD["resources"]["limits"]["nvidia.com/gpu"]
    name = KUBERNETES["metadata"]["name"]
    assert POD_VARIABLES["MASTER_ADDR"] == f"{name}-{REPLICATED_JOB['name']}-0-0.{name}"


def test_the_configurations_named_exist() -> None:
    option, config, *keys = POD["args"]
    assert parse([option, str(ROOT / config), *keys])
    assert parse(["--config", str(ROOT / SKYPILOT["envs"]["CONFIG"]), "data.shards=somewhere"])


@pytest.mark.slow
def test_a_run_on_two_nodes_of_which_one_is_killed_ends_as_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """`python tests/cluster/faults.py` injects all faults, and random ones."""
    with make_site(tmp_path, make_shards(tmp_path)) as site:
        (row,), differs = inject_all(site, ["kill -9 of a node"], 0)
    assert differs == ""
    assert row["losses_equal"]
    assert row["happens"] == "ends, resumes", "something was left running"
    assert row["steps_lost"] <= CHECKPOINT_EVERY

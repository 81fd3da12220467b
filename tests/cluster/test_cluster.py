"""launch/: files are valid, their commands train, stop and resume, and a run survives a fault."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import faults
import kubernetes_validate
import pytest
import yaml
from faults import CHECKPOINT_EVERY, ROOT, SETTINGS, inject_all, make_shards, make_site
from processes import free_port, wait_for
from runs import read_rows, saved_steps

from adamae.common.errors import BAD_INPUT, INTERRUPTED, STOPPED
from adamae.training.config import parse

LAUNCH = ROOT / "launch"
# So many that a stop comes before the last one, however busy the machine is.
STEPS = 100
# What takes seconds may take as long on a busy machine.
MAX_WAIT_S = 600.0

# Slurm's commands, for nodes that are this machine.
FAKES = {
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo 127.0.0.1;;
            "show job") echo "JobId=7 PreemptTime=${PREEMPT_TIME:-None} Restarts=0";;
            requeue*) echo "$2" >> "$FAKES/requeued";;
        esac""",
    # As on a cluster, all processes of the steps are signaled.
    "scancel": 'kill -TERM $(cat "$FAKES/tasks")',
    # Fails as the task with the highest exit code.
    "srun": """
        while [[ $1 == --* ]]; do
            [[ $1 == --ntasks=* ]] && export SLURM_NTASKS=${1#*=}
            shift
        done
        for ((task = 0; task < SLURM_NTASKS; task++)); do
            export SLURM_PROCID=$task SLURM_LOCALID=$task
            # Each task is listed before it starts, and so before it can be signaled.
            (echo $BASHPID >> "$FAKES/tasks"; exec "$@") & tasks+=($!)
        done
        code=0
        for task in ${tasks[@]}; do
            wait $task
            ended=$?
            [ $ended -gt $code ] && code=$ended
        done
        exit $code""",
}


@pytest.fixture
def slurm_job(tmp_path: Path) -> dict[str, str]:
    """Make Slurm's commands, and return the environment of a job on one node."""
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name, script in FAKES.items():
        write_script(fakes / name, script)
    return {
        # It chooses the port.
        "SLURM_JOB_ID": str(free_port() - 20_000),
        "SLURM_JOB_NODELIST": "node",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "FAKES": str(fakes),
        "PATH": f"{fakes}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def write_script(path: Path, script: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


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
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
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
                assert wait_for(has_stepped_or_ended, MAX_WAIT_S)
                assert process.poll() is None, self.log.read_text()
                process.send_signal(signal_number)
            return process.wait(MAX_WAIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(3 * MAX_WAIT_S)
def test_slurm_kubernetes_and_skypilot_resume_where_each_other_was_stopped(
    tmp_path: Path, synthetic_shards: Path, slurm_job: dict[str, str]
) -> None:
    run = tmp_path / "run"
    settings = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={run}",
        f"steps={STEPS}",
        "checkpoint_every=1000",
    ]

    arguments = ["bash", str(LAUNCH / "slurm.sbatch"), *settings, "batch_size=4"]
    slurm = Command(arguments, slurm_job, run, tmp_path / "slurm.log")
    assert slurm.launch(2, signal.SIGUSR1) == STOPPED, slurm.log.read_text()
    requeued = Path(slurm_job["FAKES"]) / "requeued"
    assert requeued.read_text().split() == [slurm_job["SLURM_JOB_ID"]]
    by_slurm = saved_steps(run)[-1]
    assert 2 <= by_slurm < STEPS, slurm.log.read_text()

    alone = {"NODES": "1", "PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"}
    first_key = POD["args"].index("--config")
    arguments = [part.replace("29500", str(free_port())) for part in POD["args"][:first_key]]
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


# Stands for training: it exits with CODE when it is signaled, or at once.
TRAINING = """
    [ -n "$AT_ONCE" ] && exit $CODE
    trap 'exit $CODE' TERM
    until [ -s "$FAKES/tasks" ]; do sleep 0.01; done
    touch "$FAKES/trains"
    for ((n = 0; n < 6000; n++)); do sleep 0.1; done"""


@pytest.mark.parametrize(
    ("signaled", "preempted", "code", "is_requeued"),
    [
        # The time limit, after a checkpoint and before the first one.
        ("script", "None", STOPPED, True),
        ("script", "None", INTERRUPTED, False),
        # A preemption with a grace time, within which the job ends.
        ("steps", "2026-11-28T10:00:00", STOPPED, True),
        # scancel --signal=TERM.
        ("steps", "None", STOPPED, False),
        # A mistake, also in a job that would be preempted.
        ("", "2026-11-28T10:00:00", BAD_INPUT, False),
    ],
)
def test_a_slurm_job_requeues_itself_if_it_was_stopped_and_has_saved(
    slurm_job: dict[str, str], signaled: str, preempted: str, code: int, is_requeued: bool
) -> None:
    fakes = Path(slurm_job["FAKES"])
    write_script(fakes / "python", TRAINING)
    environment = {**os.environ, **slurm_job, "PREEMPT_TIME": preempted, "CODE": str(code)}
    environment["AT_ONCE"] = "" if signaled else "yes"
    command = ["bash", str(LAUNCH / "slurm.sbatch")]
    script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    if signaled:
        assert wait_for((fakes / "trains").exists, 120)
    if signaled == "script":
        script.send_signal(signal.SIGUSR1)
    elif signaled == "steps":
        subprocess.run([fakes / "scancel"], env=environment, check=True)
    _, message = script.communicate(timeout=120)
    assert script.returncode == code
    assert (fakes / "requeued").exists() == is_requeued
    assert ("raise --time" in message) == (signaled == "script" and not is_requeued)


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
    option, config, *keys = POD["args"][POD["args"].index("--config") :]
    assert parse([option, str(ROOT / config), *keys])
    assert parse(["--config", str(ROOT / SKYPILOT["envs"]["CONFIG"]), "data.shards=somewhere"])


@pytest.mark.slow
@pytest.mark.timeout(3 * MAX_WAIT_S)
def test_a_run_on_two_nodes_of_which_one_is_killed_ends_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python tests/cluster/faults.py` injects all faults, and random ones."""
    for limit in ("ENDS_WITHIN_S", "RUNS_WITHIN_S"):
        monkeypatch.setattr(faults, limit, MAX_WAIT_S)
    with make_site(tmp_path, make_shards(tmp_path)) as site:
        (row,), differs = inject_all(site, ["kill -9 of a node"], 0)
    assert differs == ""
    assert row["losses_equal"]
    assert row["happens"] == "ends, resumes", "something was left running"
    assert row["steps_lost"] <= CHECKPOINT_EVERY

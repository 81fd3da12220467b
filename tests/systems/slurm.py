"""A Slurm of two nodes that are this machine; it needs root, munge and slurm-wlm."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import wait_for

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
# Ranks meet on the first one in the order of names, so that one has a name that can be looked up.
NODES = (socket.gethostname(), f"{socket.gethostname()}-2")
FIRST_PORT = 17_001
# A job of the partition `urgent` takes the nodes of one of the others, which has GRACE_S to end.
GRACE_S = 60
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=5,sched_interval=5,requeue_delay=5
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdTimeout=20
KillWait=10
MinJobAge=600
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
    " CPUs=16 Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000"
)


def missing_programs() -> str:
    """Return what has to be installed first, "" if nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurm-wlm munge"
    return ""


@contextmanager
def start_slurm(folder: Path) -> Iterator["Slurm"]:
    """Start the daemons, and end them after the block."""
    host = socket.gethostname()
    nodes = [
        NODE.format(name=name, host=host, port=FIRST_PORT + index)
        for index, name in enumerate(NODES)
    ]
    text = CONFIGURATION.format(folder=folder, host=host, nodes="\n".join(nodes), grace=GRACE_S)
    configuration = folder / "slurm.conf"
    configuration.write_text(text)
    (folder / "state").mkdir()
    slurm = Slurm(folder)
    with _start_munge():
        slurm.call("slurmctld")
        try:
            for name in NODES:
                slurm.call("slurmd", "-N", name)
            assert wait_for(lambda: slurm.count_idle_nodes() == len(NODES), 300)
            yield slurm
            slurm.call("scancel", "--user=root")
        finally:
            for name in NODES:
                _stop_daemon(folder / f"slurmd.{name}.pid")
            _stop_daemon(folder / "slurmctld.pid")


@contextmanager
def _start_munge() -> Iterator[None]:
    """Start the daemon by which Slurm's know each other, if it does not run, and end it then."""
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True).returncode == 0:
        yield
        return
    folder = Path("/run/munge")
    folder.mkdir(exist_ok=True)
    shutil.chown(folder, "munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=True)
    try:
        yield
    finally:
        _stop_daemon(folder / "munged.pid")


def _stop_daemon(pid: Path) -> None:
    if pid.exists():
        subprocess.run(["kill", pid.read_text().strip()], check=False)


class Slurm:
    """Slurm's commands, on the cluster of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, **variables: str) -> str:
        """Run a command of Slurm's and return its output."""
        environment = {**self.environment, **variables}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    def count_idle_nodes(self) -> int:
        """Return how many nodes wait for jobs; 0 as long as slurmctld does not answer."""
        with suppress(subprocess.CalledProcessError):
            # A node has a line for each of its partitions.
            names = self.call("sinfo", "--Node", "--noheader", "--states=idle", "--format=%N")
            return len(set(names.split()))
        return 0

    def describe(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Restarts, ExitCode and others."""
        text = self.call("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, job: str, seconds: float) -> dict[str, str]:
        """Wait until a job has ended for good, and describe it."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        assert wait_for(lambda: self.describe(job)["JobState"] in ends, seconds), self.describe(job)
        return self.describe(job)

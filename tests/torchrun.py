"""Run jobs of torchrun on this machine or in network namespaces.

Agents and workers are forked from a process that has imported everything (forked.py).
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from forked import SERVER
from processes import free_port, is_alive, read_lines, send, wait_for
from runs import read_rows
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adamae.common.errors import STOPPED, run_command
from adamae.train import train
from adamae.training.config import parse
from adamae.training.run_dir import RunDir
from adamae.training.tasks.pretraining import Pretraining


@dataclass(frozen=True)
class Machine:
    """A node of a cluster."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    # The name of a network namespace; "": this machine's own network.
    namespace: str = ""


def slow_down(seconds: float) -> None:
    """Make every forward pass take so much longer."""
    loss = Pretraining.loss

    def slow_loss(*inputs: Any) -> Any:
        time.sleep(seconds)
        return loss(*inputs)

    Pretraining.loss = slow_loss  # type: ignore[method-assign]


def leave_late(seconds: float) -> None:
    """Let the first rank take so much longer to write the end of a run."""
    leave = RunDir.__exit__

    def wait_and_leave(run: RunDir, *raised: Any) -> None:
        if run.dist.is_main:
            time.sleep(seconds)
        leave(run, *raised)

    RunDir.__exit__ = wait_and_leave  # type: ignore[method-assign]


def hold(run: Path, num_steps: int, released: Path) -> None:
    """Let a run go no further than a step after it has logged `num_steps`, until it is released.

    released: a file; it goes on when that is there.
    """
    loss = Pretraining.loss

    def wait_and_compute(*inputs: Any) -> Any:
        while len(read_rows(run)) >= num_steps and not released.exists():
            time.sleep(0.01)
        return loss(*inputs)

    Pretraining.loss = wait_and_compute  # type: ignore[method-assign]


def enter_own_folder(folder: Path) -> None:
    """Change to the folder named by the rank's number, as on nodes that share no disk."""
    os.chdir(folder / os.environ["RANK"])


@dataclass(frozen=True)
class JobSetup:
    """What an agent needs to know for its workers; see Job."""

    arguments: list[str]
    per_node: int
    before: Callable[[], object]
    environment: dict[str, str]
    log: str
    pids: str


class Job:
    """A run of several nodes, each an agent with its workers. A context manager ends them all."""

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        machines: Sequence[Machine] = (Machine(),),
        per_node: int = 2,
        before: Callable[[], object] = int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the job; all its processes write to the file `log`.

        arguments: those of train.py, where {node} stands for the number of the node.
        per_node: workers of each node. before: called by workers before they train.
        """
        self.log = log
        # Each worker adds a line to this file: its node, its rank and its process id.
        self.pids = log.with_suffix(".pids")
        self.agents: list[ForkServerProcess] = []
        self._machines = machines
        self._setup = JobSetup(
            arguments, per_node, before, dict(environment or {}), str(log), str(self.pids)
        )

    def start(self) -> None:
        """Start an agent on each machine, with a new log."""
        self.log.write_text("")
        self.pids.write_text("")
        endpoint = f"{self._machines[0].address}:{free_port()}"
        self.agents = []
        for node, machine in enumerate(self._machines):
            inputs = (endpoint, len(self._machines), node, machine, self._setup)
            agent = SERVER.Process(target=_run_agent, args=inputs)
            agent.start()
            self.agents.append(agent)

    def workers(self, node: int | None = None) -> dict[int, int]:
        """Return the process ids by rank, of one node or all."""
        pids = {}
        for line in read_lines(self.pids):
            worker_node, rank, pid = map(int, line.split())
            if node in (None, worker_node):
                pids[rank] = pid
        return pids

    def processes(self, node: int | None = None) -> list[int]:
        """Return the process ids of the agents and workers that are alive, of one node or all."""
        agents = self.agents if node is None else [self.agents[node]]
        pids = [agent.pid or 0 for agent in agents]
        pids += self.workers(node).values()
        return [pid for pid in pids if is_alive(pid)]

    def said(self) -> str:
        """Return the log."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 240) -> list[int | None]:
        """Return the agents' exit codes, when they have ended or so many seconds have passed."""
        wait_for(self.is_over, seconds)
        return [agent.exitcode for agent in self.agents]

    def is_over(self) -> bool:
        """Return whether all agents have ended."""
        return not any(agent.is_alive() for agent in self.agents)

    def gone(self, seconds: float) -> bool:
        """Return whether all workers end within so many seconds."""
        return wait_for(lambda: not any(map(is_alive, self.workers().values())), seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all agents and workers."""
        for agent in self.agents:
            agent.kill()
            agent.join()
        send(self.workers().values(), signal.SIGKILL)
        self.gone(10)


def run(arguments: list[str], log: Path, nodes: int = 1, per_node: int = 2) -> None:
    """Run a job on this machine to its end, which must be a success."""
    with Job(arguments, log, [Machine()] * nodes, per_node) as job:
        assert job.wait() == [0] * nodes, job.said()


def _run_agent(endpoint: str, num_nodes: int, node: int, machine: Machine, setup: JobSetup) -> None:
    """Do what torchrun does on a node, in a process of its own."""
    os.dup2(os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ.update(setup.environment)
    os.environ["GLOO_SOCKET_IFNAME"] = machine.interface
    os.environ["TP_SOCKET_IFNAME"] = machine.interface
    if machine.namespace:
        with open(f"/var/run/netns/{machine.namespace}") as opened:
            assert ctypes.CDLL(None).setns(opened.fileno(), 0) == 0
    config = LaunchConfig(
        num_nodes,
        num_nodes,
        setup.per_node,
        run_id="test",
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        max_restarts=0,
        rdzv_configs={"rank": node},
        start_method="fork",
        local_addr=machine.address,
        monitor_interval=0.1,
    )
    arguments = [argument.replace("{node}", str(node)) for argument in setup.arguments]
    try:
        elastic_launch(config, _run_worker)(node, arguments, setup.before, setup.pids)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _run_worker(node: int, arguments: list[str], before: Callable[[], object], pids: str) -> None:
    """Train, as a rank of the job."""
    # PyTorch lets forked workers be killed when their parent ends, but not those of the torchrun
    # command, which are no forks. PR_SET_PDEATHSIG is 1, and 0 is no signal.
    ctypes.CDLL(None).prctl(1, 0)
    with open(pids, "a") as file:
        print(node, os.environ["RANK"], os.getpid(), file=file)
    before()
    run_command(lambda: 0 if train(parse(arguments)) else STOPPED)

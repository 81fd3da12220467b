"""torchrun's agents and workers on this machine, or in network namespaces, forked as `forked` does it."""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from forked import SERVER
from processes import is_alive, send, wait_for
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adamae.common.errors import run_command
from adamae.train import STOPPED, train
from adamae.training.config import parse
from adamae.training.tasks.pretraining import Pretraining


@dataclass(frozen=True)
class Machine:
    """Where a node of a cluster runs."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str = ""  # of the network; "": this machine's own


def slow_down(seconds: float) -> None:
    """Make every forward pass take so much longer."""
    loss = Pretraining.loss
    Pretraining.loss = lambda *inputs: (time.sleep(seconds), loss(*inputs))[1]  # type: ignore[method-assign]


def enter_own_folder(folder: Path) -> None:
    """Let a rank stand in the folder named by its number, as on nodes that share no disk."""
    os.chdir(folder / os.environ["RANK"])


class Job:
    """A run of several nodes, each an agent with its workers; all write to the file `log`. A context manager."""

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        machines: Sequence[Machine] = (Machine(),),
        per_node: int = 2,
        before: Callable[[], object] = int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """arguments: of train.py, with {node} for a node's number; before: what workers call before they train."""
        self.log, self.pids, self.agents = log, log.with_suffix(".pids"), list[ForkServerProcess]()
        self._machines = machines
        self._inputs = (
            arguments,
            per_node,
            before,
            dict(environment or {}),
            str(log),
            str(self.pids),
        )

    def start(self) -> None:
        """Start an agent on each machine, with a new log."""
        self.log.write_text("")
        self.pids.write_text("")
        endpoint = f"{self._machines[0].address}:{free_port()}"
        self.agents = [
            SERVER.Process(
                target=_agent, args=(endpoint, len(self._machines), node, machine, *self._inputs)
            )
            for node, machine in enumerate(self._machines)
        ]
        for agent in self.agents:
            agent.start()

    def workers(self, node: int | None = None) -> dict[int, int]:
        """Return the process ids by rank, of one node or all."""
        lines = (map(int, line.split()) for line in self.pids.read_text().splitlines())
        return {rank: pid for its_node, rank, pid in lines if node in (None, its_node)}

    def processes(self, node: int | None = None) -> list[int]:
        """Return the process ids of the agents and workers that are alive, of one node or all."""
        agents = self.agents if node is None else [self.agents[node]]
        return list(
            filter(is_alive, [*(agent.pid or 0 for agent in agents), *self.workers(node).values()])
        )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Return the exit codes of the agents, once they have ended or so many seconds have passed."""
        wait_for(self.is_over, seconds)
        return [agent.exitcode for agent in self.agents]

    def is_over(self) -> bool:
        return not any(agent.is_alive() for agent in self.agents)

    def gone(self, seconds: float) -> bool:
        """Whether all workers end in time."""
        return wait_for(lambda: not any(map(is_alive, self.workers().values())), seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing of it."""
        self.kill()

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.join()
        send(self.workers().values(), signal.SIGKILL)
        self.gone(10)


def run(arguments: list[str], log: Path, nodes: int = 1, per_node: int = 2) -> None:
    """Run a job to its end."""
    with Job(arguments, log, [Machine()] * nodes, per_node) as job:
        assert job.wait() == [0] * nodes, job.said()


def _agent(
    endpoint: str,
    nodes: int,
    node: int,
    machine: Machine,
    arguments: list[str],
    per_node: int,
    before: Callable[[], object],
    environment: dict[str, str],
    log: str,
    pids: str,
) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ.update(
        environment, GLOO_SOCKET_IFNAME=machine.interface, TP_SOCKET_IFNAME=machine.interface
    )
    if machine.namespace:
        with open(f"/var/run/netns/{machine.namespace}") as opened:
            assert ctypes.CDLL(None).setns(opened.fileno(), 0) == 0
    config = LaunchConfig(
        nodes,
        nodes,
        per_node,
        run_id="test",
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        max_restarts=0,
        rdzv_configs={"rank": node},
        start_method="fork",
        local_addr=machine.address,
        monitor_interval=0.1,
    )
    own = [argument.replace("{node}", str(node)) for argument in arguments]
    try:
        elastic_launch(config, _worker)(node, own, before, pids)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _worker(node: int, arguments: list[str], before: Callable[[], object], pids: str) -> None:
    ctypes.CDLL(None).prctl(
        1, 0
    )  # PR_SET_PDEATHSIG: PyTorch's forked workers have what torchrun's have not
    with open(pids, "a") as file:
        print(node, os.environ["RANK"], os.getpid(), file=file)
    before()
    run_command(lambda: 0 if train(parse(arguments)) else STOPPED)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

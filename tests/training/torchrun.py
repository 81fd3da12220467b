"""torchrun's agents and workers on this machine, forked as `forked` does it."""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from forked import SERVER
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from common.errors import run_command
from train import STOPPED, train
from training.config import parse
from training.stragglers import StragglerDetector
from training.tasks.pretraining import Pretraining


def slow_down(seconds: float) -> None:
    """Make every forward pass take so much longer."""
    loss = Pretraining.loss
    Pretraining.loss = lambda *inputs: (time.sleep(seconds), loss(*inputs))[1]  # type: ignore[method-assign]


def report(metrics: list[dict[str, float]]) -> None:
    """Let each rank report these metrics of its steps instead of measured ones."""
    own = metrics[int(os.environ["RANK"])]
    StragglerDetector.measure = lambda *_: own  # type: ignore[method-assign]


def enter_own_folder(folder: Path) -> None:
    """Let a rank stand in the folder named by its number, as on nodes that share no disk."""
    os.chdir(folder / os.environ["RANK"])


class Job:
    """A run of several nodes, each an agent with its workers; all write to the file `log`."""

    def __init__(self, arguments: list[str], log: Path, size: tuple[int, int], before: Callable[[], object]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self.log, self.pids = log, log.with_suffix(".pids")
        for file in (self.log, self.pids):
            file.touch()
        self.agents: list[ForkServerProcess] = []
        for _ in range(size[0]):
            agent = SERVER.Process(target=_agent, args=(arguments, endpoint, size, before, str(log), str(self.pids)))
            agent.start()
            self.agents.append(agent)

    def workers(self) -> dict[int, int]:
        """Process id by rank."""
        return {int(rank): int(pid) for rank, pid in (line.split() for line in self.pids.read_text().splitlines())}

    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Exit codes of the agents."""
        deadline = time.monotonic() + seconds
        for agent in self.agents:
            agent.join(max(0, deadline - time.monotonic()))
        return [agent.exitcode for agent in self.agents]

    def is_over(self) -> bool:
        return not any(agent.is_alive() for agent in self.agents)

    def gone(self, seconds: float) -> bool:
        """Whether all workers end in time."""
        deadline = time.monotonic() + seconds
        while any(map(is_alive, self.workers().values())):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.join()
        for worker in filter(is_alive, self.workers().values()):
            os.kill(worker, signal.SIGKILL)


@contextmanager
def started(
    arguments: list[str], log: Path, nodes: int = 1, per_node: int = 2, before: Callable[[], object] = int
) -> Iterator[Job]:
    """A job, whose workers call `before` before they train; at the end of the block nothing of it is left."""
    job = Job(arguments, log, (nodes, per_node), before)
    try:
        yield job
    finally:
        job.kill()


def run(arguments: list[str], log: Path, nodes: int = 1, per_node: int = 2) -> None:
    """Run a job to its end."""
    with started(arguments, log, nodes, per_node) as job:
        assert job.wait() == [0] * nodes, job.said()


def _agent(
    arguments: list[str], endpoint: str, size: tuple[int, int], before: Callable[[], object], log: str, pids: str
) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    nodes, per_node = size
    config = LaunchConfig(
        nodes, nodes, per_node, run_id="test", rdzv_backend="c10d", rdzv_endpoint=endpoint, max_restarts=0,
        start_method="fork", local_addr="127.0.0.1", monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, _worker)(arguments, before, pids)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _worker(arguments: list[str], before: Callable[[], object], pids: str) -> None:
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: PyTorch's forked workers have what torchrun's have not
    with open(pids, "a") as file:
        print(os.environ["RANK"], os.getpid(), file=file)
    before()
    run_command(lambda: 0 if train(parse(arguments)) else STOPPED)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""A run of train.py on several nodes, each a torchrun with its workers, and what can be done to these."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from network import Network

ROOT = Path(__file__).parents[2]


class Run:
    """A run folder and the command that resumes it, on as many nodes as the network has machines."""

    def __init__(
        self, folder: Path, net: Network, ranks: int, settings: list[str], environment: dict[str, str]
    ) -> None:
        """ranks: per node; settings: overrides of train.py's configuration, but for `run`."""
        self.folder, self.net, self.ranks = folder, net, ranks
        # Machines have disks of their own.
        self.caches = [folder.parent / f"{folder.name}-cache-{node}" for node in range(len(net.machines))]
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._settings, self._environment = [*settings, f"run={folder}"], environment
        self._logs: list[Path] = []
        self._starts = 0

    def start(self) -> None:
        """Start a torchrun on each machine; a new attempt after each fault."""
        self._starts += 1
        port = free_port()
        self.nodes, self._logs = [], []
        for node, machine in enumerate(self.net.machines):
            command = [
                *machine.enter, sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.net.machines)}",
                f"--node-rank={node}", f"--nproc-per-node={self.ranks}", f"--master-port={port}",
                f"--master-addr={self.net.machines[0].address}",
                str(ROOT / "train.py"), *self._settings, f"data.cache_dir={self.caches[node]}",
            ]  # fmt: skip
            environment = {
                **os.environ, **self._environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": machine.interface, "TP_SOCKET_IFNAME": machine.interface,
            }  # fmt: skip
            self._logs.append(self.folder.parent / f"{self.folder.name}-{self._starts}-node-{node}.log")
            with open(self._logs[-1], "wb") as log:
                self.nodes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                )

    def group(self, node: int) -> list[int]:
        """All living processes of a node: torchrun starts each worker as a session of its own, so what they share is
        their arguments."""
        arguments = {f"run={self.folder}", f"data.cache_dir={self.caches[node]}"}
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if arguments <= set((process / "cmdline").read_text(errors="replace").split("\0")):
                    found.append(int(process.name))
        return found

    def workers(self, node: int) -> list[int]:
        return [pid for pid in self.group(node) if pid != self.nodes[node].pid]

    def everyone(self) -> list[int]:
        return [pid for node in range(len(self.nodes)) for pid in self.group(node)]

    def wait_until_over(self, seconds: float) -> bool:
        """Whether nothing of the run is left within so many seconds."""
        # A process that is ending has lost its arguments before it has an exit code.
        return self.wait_for(lambda: not self.everyone() and None not in self.exit_codes(), seconds)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.exit_codes()  # so that none stays a zombie
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        send(self.everyone(), signal.SIGCONT)
        send(self.everyone(), signal.SIGKILL)
        for process in self.nodes:
            process.wait()
        self.wait_until_over(10)

    def exit_codes(self) -> list[int | None]:
        return [node.poll() for node in self.nodes]

    def losses(self) -> dict[int, float]:
        """Loss of every step that the run's metrics tell of."""
        losses = {}
        with suppress(OSError):
            for line in (self.folder / "metrics.jsonl").read_bytes().split(b"\n"):
                with suppress(ValueError):  # one that is being written
                    row = json.loads(line)
                    losses[int(row["step"])] = row["loss"]
        return losses

    def step(self) -> int:
        return max(self.losses(), default=0)

    def saved_step(self) -> int:
        """Of the newest checkpoint."""
        steps = [int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
        return max(steps, default=0)

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self._logs)


def send(pids: list[int], number: int) -> None:
    """Signal processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

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
from typing import Any

from network import Loopback, Namespaces

ROOT = Path(__file__).parents[2]


class Run:
    """A run folder and the command that goes on with it, on as many nodes as the network has machines."""

    def __init__(self, folder: Path, net: Loopback | Namespaces, settings: list[str], environment: dict[str, str]):
        """`settings`: overrides of train.py's configuration, but for `run`."""
        self.folder, self.net = folder, net
        self._settings, self._environment = [*settings, f"run={folder}"], environment
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []
        self._starts = 0

    def start(self, nodes: int = 2, processes: int = 1, *more: str) -> None:
        """Start a torchrun of so many processes on each of the first machines; a new attempt after each fault."""
        self._starts += 1
        port = free_port()
        self.nodes, self.logs = [], []
        for number, machine in enumerate(self.net.machines[:nodes]):
            settings = [*self._settings, f"data.cache_dir={self.cache(number)}", *more]
            launcher = [
                *machine.enter, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes),
                "--node-rank", str(number), "--nproc-per-node", str(processes),
                "--master-addr", self.net.machines[0].address, "--master-port", str(port),
            ]  # fmt: skip
            environment = {
                **os.environ, **self._environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": machine.interface, "TP_SOCKET_IFNAME": machine.interface,
            }  # fmt: skip
            self.logs.append(self.folder.parent / f"{self.folder.name}-{self._starts}-node-{number}.log")
            with open(self.logs[-1], "wb") as log:
                command = [*launcher, str(ROOT / "train.py"), *settings]
                self.nodes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                )

    def cache(self, node: int) -> Path:
        """A folder of the store's files for each node, as machines have disks of their own."""
        return self.folder.parent / f"{self.folder.name}-cache-{node}"

    def caches(self) -> list[Path]:
        return [self.cache(node) for node in range(len(self.net.machines))]

    def workers(self, node: int) -> list[int]:
        """Process ids of a node's workers, while its torchrun lives."""
        pid = self.nodes[node].pid
        with suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(child) for child in children if "train.py" in _command_line(int(child))]
        return []

    def group(self, node: int) -> list[int]:
        """All living processes of a node, its torchrun's orphans among them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                    # torchrun starts each worker as a session of its own: what they share is the run folder.
                    own = f"run={self.folder}" in _command_line(int(entry.name)).split("\0") and self._is_on(
                        entry, node
                    )
                    if state != "Z" and (int(group) == self.nodes[node].pid or own):
                        found.append(int(entry.name))
        return found

    def _is_on(self, process: Path, node: int) -> bool:
        return f"data.cache_dir={self.cache(node)}\0" in (process / "cmdline").read_text()

    def signal_node(self, node: int, number: int) -> None:
        """What a scheduler does that signals all processes of a job at once."""
        for pid in self.group(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def is_over(self) -> bool:
        return not any(self.group(node) for node in range(len(self.nodes)))

    def wait_until_over(self, seconds: float) -> bool:
        """Whether nothing of the run is left within so many seconds."""
        return self.wait_for(self.is_over, seconds)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            for node in self.nodes:
                node.poll()  # so that none stays a zombie
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        for node in range(len(self.nodes)):
            self.signal_node(node, signal.SIGCONT)
            self.signal_node(node, signal.SIGKILL)
        for process in self.nodes:
            process.wait()
        self.wait_until_over(10)

    def exit_codes(self) -> list[int | None]:
        return [node.poll() for node in self.nodes]

    def losses(self) -> dict[int, float]:
        """Loss of every step that the run's metrics tell of."""
        return {int(line["step"]): line["loss"] for line in self._metrics()}

    def step(self) -> int:
        return max(self.losses(), default=0)

    def _metrics(self) -> list[dict[str, Any]]:
        lines = []
        with suppress(OSError):
            for line in (self.folder / "metrics.jsonl").read_bytes().split(b"\n"):
                with suppress(ValueError):  # one that is being written
                    lines.append(json.loads(line))
        return lines

    def saved_step(self) -> int:
        """Of the newest checkpoint."""
        steps = [int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
        return max(steps, default=0)

    def weights(self, step: int) -> Path:
        return self.folder / f"checkpoints/step-{step:08d}/model.safetensors"

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs)


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

"""Look at processes that tests have started, signal them, and wait for what they do.

A wait ends when its condition holds. Its limit is only for what never happens: ten times what a
quiet machine needs, as tests share their cores with other work.
"""

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_lines(file: Path) -> list[str]:
    """Read the whole lines of a file that another process writes; return [] while there is none."""
    if not file.exists():
        return []
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    # The last one may be half written, or a kill may have cut it off.
    return [line for line in lines if line.endswith("\n")]


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return _read_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def are_asleep(pids: list[int]) -> bool:
    """Return whether all processes wait for something, and not only for a moment."""
    for _ in range(20):
        if any(_read_state(pid) != "S" for pid in pids):
            return False
        time.sleep(0.01)
    return True


def _read_state(pid: int) -> str:
    """Return the letter of a process's state (man 5 proc_pid_stat)."""
    # It follows the name, which is in parentheses and may hold any character.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def list_descendants(pid: int) -> list[int]:
    """List the processes that a process has started, and those that these have started."""
    descendants = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may have ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                descendants += [int(child), *list_descendants(int(child))]
    return descendants


def take_interrupts() -> None:
    """Let Ctrl-C interrupt this process, which a shell prevents for programs in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port() -> int:
    """Return a port that no process listens on now, and that none gets unless it asks for it."""
    while True:
        # Linux gives those from 32768 on to outgoing connections, and to servers at "any port".
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port

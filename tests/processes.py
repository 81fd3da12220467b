"""Processes that tests have started: what they do, and waiting for it."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def are_asleep(processes: list[int]) -> bool:
    """Tell whether all wait for something."""
    return all(
        Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "S" for pid in processes
    )


def list_descendants(pid: int) -> list[int]:
    found = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return found + [pid for child in found for pid in list_descendants(child)]


def take_interrupts() -> None:
    """Undo what a shell does to programs in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""What processes ask of the kernel."""

import ctypes
import os
import signal
import time
from pathlib import Path

# An option of prctl(2), from linux/prctl.h.
PR_SET_PDEATHSIG = 1


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends.

    Otherwise, the workers of a killed process would keep running.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)


def find_parent_start() -> float:
    """Return when the process that has started this one began, in seconds since 1970."""
    # The name of the program, in brackets, may hold spaces. `starttime` is the 22nd field of
    # proc(5), so the 20th behind the name, in clock ticks since the machine was started.
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot

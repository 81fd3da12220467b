"""What processes ask of the kernel."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""An option of prctl(2), from linux/prctl.h."""


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal as soon as the thread that started it has ended.

    Workers whose parent is killed would otherwise continue, as nobody is left who could stop them.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)

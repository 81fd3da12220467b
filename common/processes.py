"""What processes ask of the kernel."""

import ctypes
import signal

# An option of prctl(2), from linux/prctl.h.
PR_SET_PDEATHSIG = 1


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends.

    Otherwise, the workers of a killed process would keep running.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)

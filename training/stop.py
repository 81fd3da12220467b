"""Signals that ask a run to save and stop: Ctrl-C, and SIGTERM, SIGUSR1 or SIGHUP of a scheduler,
of torchrun or of a terminal that closes."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from adamae.common.errors import SavedInterrupt

MESSAGE = (
    "\nstopping: the run ends when this step is saved; press Ctrl-C again to end it at once,"
    " without saving\n"
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A second SIGINT that comes sooner is the same Ctrl-C: the terminal sends it to the whole process
# group, and a launcher forwards its own to the ranks.
DEBOUNCE_S = 1.0


class StopRequest:
    """Whether a signal has asked this rank to stop; a context manager that installs the handlers.

    Any number of requests count as one: the scheduler, torchrun and the kernel may each send a
    signal for the same reason. Until `defer` is set, and in the `allow_interrupt` block, there is
    nothing to save, and a request raises KeyboardInterrupt; later only a second Ctrl-C does.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.defer = False
        self._first_ctrl_c = math.inf
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            # nohup has set SIGHUP to be ignored, and the run must survive the terminal.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def allow_interrupt(self) -> Iterator[None]:
        """Let a request, also an earlier one, end the run within the block: it has been saved.

        Raise SavedInterrupt then.
        """
        self.defer = False
        try:
            if self.is_set:
                raise SavedInterrupt
            yield
        except KeyboardInterrupt as interrupt:
            raise SavedInterrupt from interrupt
        finally:
            self.defer = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_second_ctrl_c(number) or not self.defer:
            raise KeyboardInterrupt
        if self.is_set:
            return
        self.is_set = True
        try:
            # The signal may have interrupted a print, within which another print raises.
            os.write(2, MESSAGE.encode())
        except OSError:
            # The terminal has gone. Without stderr the next line of the log would end the run.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def _is_second_ctrl_c(self, number: int) -> bool:
        if number != signal.SIGINT:
            return False
        now = time.monotonic()
        self._first_ctrl_c = min(self._first_ctrl_c, now)
        return now - self._first_ctrl_c > DEBOUNCE_S

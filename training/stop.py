"""Signals that ask a run to save and stop: Ctrl-C, a scheduler's SIGTERM, SIGUSR1 or SIGHUP, the end of torchrun."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MESSAGE = "\nstopping: the run ends when this step is saved; press Ctrl-C again to end it at once, without saving\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
DEBOUNCE_S = 1.0  # what comes faster is the same Ctrl-C, which a launcher has forwarded


class StopRequest:
    """Whether a signal has asked this rank to stop; a context manager that installs the handlers.

    Any number of requests count as one: the scheduler, torchrun and the kernel may each send a signal for the same
    reason. Until `defer` is set, and in the `allow_interrupt` block, there is nothing to save, and a request raises
    KeyboardInterrupt; later only a second Ctrl-C does.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.defer = False
        self._first_ctrl_c = math.inf
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # which nohup has set
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def allow_interrupt(self) -> Iterator[None]:
        """In the block, let a request end the run: it has been saved."""
        self.defer = False
        try:
            if self.is_set:
                raise KeyboardInterrupt
            yield
        finally:
            self.defer = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._first_ctrl_c = min(self._first_ctrl_c, time.monotonic())
        is_second_ctrl_c = (
            number == signal.SIGINT and time.monotonic() - self._first_ctrl_c > DEBOUNCE_S
        )
        if is_second_ctrl_c or not self.defer:
            raise KeyboardInterrupt
        if not self.is_set:
            self.is_set = True
            try:
                os.write(
                    2, MESSAGE.encode()
                )  # print may have been interrupted in the middle of a print
            except OSError:  # the terminal has gone, and must not take the run with it when the next line is written
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

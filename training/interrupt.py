"""What asks a run to save and stop: Ctrl-C, a scheduler's SIGTERM, SIGUSR1 or SIGHUP, the end of its torchrun."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch

from training.distributed import any_process

T = TypeVar("T")

SAID = "\nstopping: the run ends as soon as it has saved; a second Ctrl-C ends it at once, without saving\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
APART_S = 1.0  # what comes faster is one Ctrl-C, which a launcher has passed on


class StopRequest:
    """Installs the handlers for as long as the process lives. Any number of requests are one, but for Ctrl-C's: the
    scheduler, torchrun and the kernel may each send a signal for the same reason."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = self._nothing_to_lose = self._waiting = False
        self._ctrl_c: float | None = None  # when the first one came
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # which nohup has set
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._nothing_to_lose or (number == signal.SIGINT and self._is_second_ctrl_c()):
            raise KeyboardInterrupt
        if not self._asked:
            self._asked = True
            _say(SAID)
        if self._waiting:
            self._waiting = False  # the next signal must not meet the way out of the wait
            raise StopAsked

    def _is_second_ctrl_c(self) -> bool:
        if self._ctrl_c is None:
            self._ctrl_c = time.monotonic()
        return time.monotonic() - self._ctrl_c > APART_S

    def next_of(self, values: Iterator[T]) -> T | None:
        """The next value, however long that takes, or None once this process has been asked to stop."""
        try:
            try:
                self._waiting = True
                return None if self._asked else next(values)
            finally:
                self._waiting = False
        except StopAsked:  # which may come as late as in the line above
            return None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In the block, where nothing is to be saved, a request ends the run the moment it comes."""
        self._nothing_to_lose = True
        try:
            if any_process(self._asked, self._device):
                raise KeyboardInterrupt
            yield
        finally:
            self._nothing_to_lose = False


class StopAsked(BaseException):
    """Ends a wait; no error, so that nothing between the wait and its end takes it for one."""


def _say(sentence: str) -> None:
    try:
        os.write(2, sentence.encode())  # print could be called in the middle of another print
    except OSError:  # the terminal has gone, and must not take the run with it when the next line is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

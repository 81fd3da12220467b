"""Ctrl-C and SIGTERM ask a run to save and stop after the step it is in; a second Ctrl-C stops at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from training.distributed import any_process

SAID = "\nstopping: the run ends as soon as it has saved; a second Ctrl-C ends it at once, without saving\n"


class StopRequest:
    """Installs the handlers for as long as the process lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = self._nothing_to_lose = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked or self._nothing_to_lose:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, SAID.encode())  # print could be called in the middle of another print

    def granted(self, may_talk: bool) -> bool:
        """Whether to stop now. All processes must stop at the same step, so several agree only where `may_talk`."""
        if torch.distributed.is_initialized():
            return may_talk and any_process(self._asked, self._device)
        return self._asked

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In the block, where nothing is to be saved, a request ends the run the moment it comes."""
        self._nothing_to_lose = True
        try:
            if self.granted(may_talk=True):
                raise KeyboardInterrupt
            yield
        finally:
            self._nothing_to_lose = False

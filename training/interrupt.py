"""Ctrl-C and SIGTERM ask a run to save and stop after the step it is in; a second Ctrl-C stops at once."""

import os
import signal
from types import FrameType

import torch

from training.distributed import any_process

SAID = "\nstopping: the run ends as soon as it has saved; a second Ctrl-C ends it at once, without saving\n"


class StopRequest:
    """Installs the handlers for as long as the process lives."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, SAID.encode())  # print could be called in the middle of another print

    def granted(self, device: torch.device, may_talk: bool) -> bool:
        """Whether to stop now. All processes must stop at the same step, so several agree only where `may_talk`."""
        if torch.distributed.is_initialized():
            return may_talk and any_process(self._asked, device)
        return self._asked

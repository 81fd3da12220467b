"""Clips that were cut on the CPU, on their way to the device."""

import threading
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

Shape = tuple[int, int, int, int, int]  # B T H W C


class HostClips:
    """Where a batch's clips are cut on the CPU; there is no memory before it is asked for, as DALI may cut them all."""

    def __init__(self, shape: Shape, pinned: bool) -> None:
        """`pinned`: so that the copy to the device does not hold up the host."""
        self.shape, self._pinned = shape, pinned
        self._clips: Tensor | None = None
        self._lock = threading.Lock()

    @property
    def is_used(self) -> bool:
        return self._clips is not None

    @property
    def clips(self) -> UInt8[Tensor, "B T H W C"]:
        with self._lock:
            if self._clips is None:
                self._clips = torch.empty(self.shape, dtype=torch.uint8, pin_memory=self._pinned)
            return self._clips


@dataclass(frozen=True)
class Copy:
    """A batch on its way."""

    clips: UInt8[Tensor, "B T H W C"]  # on the device
    arrived: torch.cuda.Event | None  # None: it is there


class Uploads:
    """Copies to the device beside what it computes: on a stream of their own, which the step waits for by an event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, host: HostClips) -> Copy:
        """Queue a copy; what writes to `host` later may or may not be in it."""
        if not host.is_used:
            return Copy(torch.empty(host.shape, dtype=torch.uint8, device=self._device), None)
        if self._stream is None:
            return Copy(host.clips, None)
        with torch.cuda.stream(self._stream):
            # PyTorch does not give the pinned memory to anybody else before this stream has read it.
            clips = host.clips.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(clips, event)

    def finish(self, copy: Copy) -> UInt8[Tensor, "B T H W C"]:
        """The clips, for the stream that is current: it waits for them, the host does not."""
        if copy.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copy.arrived)
            copy.clips.record_stream(stream)  # the memory is the other stream's: not to be reused while this one reads
        return copy.clips

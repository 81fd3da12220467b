"""Copies of clips from the CPU to the device."""

import threading

import torch
from jaxtyping import UInt8
from torch import Tensor


class HostClips:
    """The clips of a batch in host memory, which is allocated on first use: DALI may decode the whole batch."""

    def __init__(self, shape: tuple[int, ...], stream: torch.cuda.Stream | None) -> None:
        """stream: on which clips are copied to its GPU, beside the training step; None: they stay on the CPU."""
        self._shape, self._stream = shape, stream
        self._clips: Tensor | None = None
        self._lock = threading.Lock()
        self.copy: Tensor | None = None  # on the device, perhaps still in flight
        self._arrived: torch.cuda.Event | None = None

    @property
    def is_allocated(self) -> bool:
        return self._clips is not None

    @property
    def clips(self) -> UInt8[Tensor, "B T H W C"]:
        with self._lock:
            if self._clips is None:  # page-locked, so that copying to the device does not block the host
                self._clips = torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._stream is not None)
            return self._clips

    def upload(self) -> None:
        """Queue a copy; later writes to `clips` may or may not be in it."""
        if self._stream is None:
            self.copy = self.clips
            return
        with torch.cuda.stream(self._stream):
            # PyTorch does not reuse the pinned memory before this stream has read it.
            self.copy = self.clips.to(self._stream.device, non_blocking=True)
            self._arrived = self._stream.record_event()

    def on_device(self) -> UInt8[Tensor, "B T H W C"]:
        """Return the clips for use on the current stream, which waits for them; the host does not."""
        if self.copy is None:
            self.upload()
        assert self.copy is not None
        if self._arrived is not None:
            stream = torch.cuda.current_stream(self.copy.device)
            stream.wait_event(self._arrived)
            self.copy.record_stream(stream)  # memory of the other stream: not to be reused while this one reads
        return self.copy

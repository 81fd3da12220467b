"""Copies of clips from the CPU to the device."""

import threading
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

Shape = tuple[int, int, int, int, int]  # B T H W C


class HostClips:
    """The clips of a batch in host memory, which is allocated on first use: DALI may decode the whole batch."""

    def __init__(self, shape: Shape, pinned: bool) -> None:
        """pinned: page-locked, so that copying to the device does not block the host."""
        self.shape, self._pinned = shape, pinned
        self._clips: Tensor | None = None
        self._lock = threading.Lock()

    @property
    def is_allocated(self) -> bool:
        return self._clips is not None

    @property
    def clips(self) -> UInt8[Tensor, "B T H W C"]:
        with self._lock:
            if self._clips is None:
                self._clips = torch.empty(self.shape, dtype=torch.uint8, pin_memory=self._pinned)
            return self._clips


@dataclass(frozen=True)
class Upload:
    """A copy in flight."""

    clips: UInt8[Tensor, "B T H W C"]  # on the device
    arrived: torch.cuda.Event | None  # None: it is complete


class Uploader:
    """Copies to the device on a stream of its own, beside the training step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, host: HostClips) -> Upload:
        """Queue a copy; later writes to `host` may or may not be in it."""
        if self._stream is None:
            return Upload(host.clips, None)
        with torch.cuda.stream(self._stream):
            # PyTorch does not reuse the pinned memory before this stream has read it.
            clips = host.clips.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Upload(clips, event)

    def finish(self, upload: Upload) -> UInt8[Tensor, "B T H W C"]:
        """Return the clips for use on the current stream, which waits for them; the host does not."""
        if upload.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(upload.arrived)
            upload.clips.record_stream(stream)  # memory of the other stream: not to be reused while this one reads
        return upload.clips

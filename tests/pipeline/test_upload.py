"""Clips decoded on the CPU are copied to the GPU beside the training step."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipeline.decoding.upload import HostClips, Uploader

SHAPE = (2, 3, 4, 4, 3)


class Streams:
    """Stands in for torch.cuda: writes down what is queued on which stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.now = "compute"
        log, streams = self.said, self

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = name if isinstance(name, str) else "side"

            def wait_event(self, event: Any) -> None:
                log.append(f"{self.name} waits for {event.of}")

        class Event:
            def record(self, stream: Stream) -> None:
                self.of = log[-1]

        @contextmanager
        def stream(chosen: Stream) -> Any:
            before, streams.now = streams.now, chosen.name
            yield
            streams.now = before

        def to(clips: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
            assert non_blocking
            log.append(f"copy on {streams.now}")
            return clips.clone()

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "record_stream", lambda clips, stream: log.append(f"memory kept for {stream.name}"))


def test_the_copy_is_queued_beside_the_step_and_the_step_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    uploader, host = Uploader(torch.device("cuda")), HostClips(SHAPE, pinned=False)
    host.clips.fill_(7)
    upload = uploader.start(host)
    assert streams.said == ["copy on side"], "and the host has gone on"
    assert torch.equal(uploader.finish(upload), host.clips)
    assert streams.said[1:] == ["compute waits for copy on side", "memory kept for compute"]


def test_on_a_cpu_nothing_is_copied() -> None:
    uploader, host = Uploader(torch.device("cpu")), HostClips(SHAPE, pinned=False)
    assert not host.is_allocated
    host.clips.fill_(7)
    assert host.is_allocated
    assert uploader.finish(uploader.start(host)) is host.clips


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_step() -> None:
    device = torch.device("cuda")
    uploader, host = Uploader(device), HostClips((64, 16, 224, 224, 3), pinned=True)
    host.clips.fill_(7)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    step = torch.cuda.Event()
    step.record()
    upload = uploader.start(host)
    assert upload.arrived is not None
    upload.arrived.synchronize()
    assert not step.query(), "the step is still at it"
    assert (uploader.finish(upload) == 7).all()

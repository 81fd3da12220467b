"""Clips decoded on the CPU are copied to the GPU during the training step."""

import pytest
import torch

from pipeline.decoding.upload import HostClips, Uploader


def test_on_a_cpu_nothing_is_copied() -> None:
    uploader, host = Uploader(torch.device("cpu")), HostClips((2, 3, 4, 4, 3), pinned=False)
    assert not host.is_allocated
    host.clips.fill_(7)
    assert host.is_allocated
    assert uploader.finish(uploader.start(host)) is host.clips


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_step() -> None:
    uploader, host = Uploader(torch.device("cuda")), HostClips((64, 16, 224, 224, 3), pinned=True)
    host.clips.fill_(7)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    step = torch.cuda.Event()
    step.record()
    upload = uploader.start(host)
    assert upload.arrived is not None
    upload.arrived.synchronize()
    assert not step.query(), "the step is still running"
    assert (uploader.finish(upload) == 7).all()

"""Clips decoded on the CPU are copied to the GPU during the training step."""

import numpy as np
import pytest
import torch

from pipeline.decoding.upload import HostClips


def test_on_a_cpu_nothing_is_copied() -> None:
    host = HostClips((2, 3, 4, 4, 3), None, takes_frames=False)
    assert not host.is_allocated
    images = host.images(0, 2)
    assert host.is_allocated
    assert np.shares_memory(host.on_device().numpy(), images)


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_step() -> None:
    copying = torch.cuda.Stream()
    host = HostClips((64, 16, 224, 224, 3), copying, takes_frames=False)
    host.images(0, 64)[:] = 7
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    step = torch.cuda.Event()
    step.record()
    host.upload()
    copying.synchronize()
    assert not step.query(), "the step is still running"
    assert (host.on_device() == 7).all()

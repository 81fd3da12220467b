"""Blocks of shared memory are nobody else's while they are used, and are the same memory in other processes."""

import os
import resource
from types import SimpleNamespace

import pytest
import torch

from common.errors import InputError
from pipeline.clip_memory import BlockLayout, ClipMemory

LAYOUT = BlockLayout(num_clips=3, clip_shape=(2, 4, 4, 3), slot_bytes=200)


def test_a_block_is_used_again_once_nothing_is_left_of_it() -> None:
    memory = ClipMemory(LAYOUT)
    number, block = memory.acquire()
    part = torch.from_numpy(block[16:32].reshape(4, -1))
    assert memory.acquire()[0] != number
    del block
    row = part[1]
    del part
    assert memory.acquire()[0] != number
    del row
    both = memory.acquire(), memory.acquire()
    assert {number for number, _ in both} == {0, 1}
    assert os.fstat(memory.fileno()).st_size == 2 * LAYOUT.block_bytes, "of which only what was written to exists"


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some virtual machines."""
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 801)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    with pytest.raises(InputError, match=r"cannot lock shared memory.*error 801"):
        ClipMemory(LAYOUT).acquire(pin=True)


@pytest.mark.parametrize(
    ("kind", "reason"), [(resource.RLIMIT_FSIZE, "File too large"), (resource.RLIMIT_AS, "Cannot allocate memory")]
)
def test_a_limit_of_the_shell_is_an_error(kind: int, reason: str) -> None:
    memory, before = ClipMemory(LAYOUT._replace(slot_bytes=2**40)), resource.getrlimit(kind)
    resource.setrlimit(kind, (2**40, before[1]))
    try:
        with pytest.raises(InputError, match=rf"another batch of 3\.3 TB \({reason}\): lower the batch size"):
            memory.acquire()
    finally:
        resource.setrlimit(kind, before)
        memory.close()

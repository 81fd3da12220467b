"""Blocks of shared memory are nobody else's while they are used, and arrive in other processes without being copied."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import InputError
from pipeline.shared_blocks import SharedBlocks


def test_a_block_is_used_again_once_nothing_is_left_of_it() -> None:
    memory = SharedBlocks()

    def allocate_elsewhere(num_bytes: int) -> bool:
        block = memory.find(memory.allocate(num_bytes))
        return block is not None and block.start != start

    array = memory.allocate(5000)
    found = memory.find(array)
    assert found is not None
    start = found.start
    part = torch.from_numpy(array[16:].reshape(4, -1))
    assert allocate_elsewhere(5000)
    del array
    row = part[1]
    del part
    assert allocate_elsewhere(5000)
    del row
    assert allocate_elsewhere(9000), "a block of another size"
    assert not allocate_elsewhere(5001), "one of a similar size"
    assert memory.find(np.empty(10)) is None


def test_arrays_arrive_among_other_things() -> None:
    ours = SharedBlocks()
    theirs = SharedBlocks(os.dup(ours.fileno()))
    block = ours.allocate(5000)
    block[:] = np.arange(5000) % 256
    number, found, other = theirs.loads(ours.dumps((7, block, np.arange(3))))
    assert (number, other.tolist()) == (7, [0, 1, 2])
    assert (found == np.arange(5000) % 256).all()
    found[3] = 99
    assert block[3] == 99, "it is the same memory"
    for memory in (ours, theirs):
        memory.close()
    assert found[3] == 99


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some virtual machines."""
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 801)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    blocks = SharedBlocks(is_pinned=True)
    with pytest.raises(InputError, match=r"cannot lock shared memory.*error 801"):
        blocks.loads(blocks.dumps(blocks.allocate(10)))

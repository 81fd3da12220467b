"""Shared memory that cannot be had is an error in one sentence; if it cannot be locked, a note.

test_worker_pool.py is about what lies in it, and for how long.
"""

import resource
from types import SimpleNamespace

import pytest

from adamae.common.errors import InputError
from adamae.pipeline.clip_memory import BlockLayout, ClipMemory

LAYOUT = BlockLayout(num_clips=3, clip_shape=(2, 4, 4, 3), slot_bytes=200)


def test_memory_that_cannot_be_locked_stays_pageable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on some virtual machines. It is tried and said once, and the error is cleared."""
    calls = []

    def refuse(*_: int) -> int:
        calls.append("cudaHostRegister")
        return 801

    # Without cudaHostUnregister, as nothing is to be unlocked.
    monkeypatch.setattr("torch.cuda.cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    runtime = SimpleNamespace(cudaGetLastError=lambda: calls.append("cudaGetLastError"))
    monkeypatch.setattr("adamae.common.devices.load_cuda_runtime", lambda: runtime)
    memory = ClipMemory(LAYOUT)
    blocks = [memory.acquire(pin=True)[1] for _ in range(2)]
    assert [len(block) for block in blocks] == [memory.block_bytes] * 2
    memory.close()
    assert calls == ["cudaHostRegister", "cudaGetLastError"]
    (note,) = capfd.readouterr().err.splitlines()
    assert note.startswith("note: CUDA cannot lock the loader's shared memory (cudaHostRegister: e")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(resource.RLIMIT_FSIZE, "File too large"), (resource.RLIMIT_AS, "Cannot allocate memory")],
)
def test_a_limit_of_the_shell_is_an_error(kind: int, reason: str) -> None:
    memory = ClipMemory(LAYOUT._replace(slot_bytes=2**40))
    before = resource.getrlimit(kind)
    message = rf"another batch of 3\.3 TB \({reason}\): lower the batch size"
    resource.setrlimit(kind, (2**40, before[1]))
    try:
        with pytest.raises(InputError, match=message):
            memory.acquire()
    finally:
        resource.setrlimit(kind, before)
        memory.close()

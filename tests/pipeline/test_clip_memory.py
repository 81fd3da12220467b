"""Shared memory that cannot be had is an error in one sentence.

test_worker_pool.py is about what lies in it, and for how long.
"""

import resource
from types import SimpleNamespace

import pytest

from adamae.common.errors import InputError
from adamae.pipeline.clip_memory import BlockLayout, ClipMemory

LAYOUT = BlockLayout(num_clips=3, clip_shape=(2, 4, 4, 3), slot_bytes=200)


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some virtual machines."""
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 801)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    with pytest.raises(InputError, match=r"cannot lock shared memory.*error 801"):
        ClipMemory(LAYOUT).acquire(pin=True)


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

"""What processes say of each other when one is missing, with a store that lies in this process."""

import errno
import threading

import pytest
import torch.distributed as dist

from common.errors import InputError, PeerLostError
from training import distributed
from training.distributed import end_told, others_awaited


class Silent(dist.HashStore):
    """Behind a network that has been cut: a question is never answered."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of two processes, of which this is the first."""
    store = dist.HashStore()
    store.set("host of 1", "elsewhere")
    as_one_of_two(monkeypatch, store)
    return store


def as_one_of_two(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "_store", lambda: store)
    monkeypatch.setattr(distributed, "ROLL_CALL_S", 0.2)


def left_alone() -> None:
    with others_awaited():
        raise RuntimeError("[gloo] Connection closed by peer")


def test_who_does_not_answer_is_named(store: dist.Store) -> None:
    with pytest.raises(PeerLostError, match=r"^process 1 on elsewhere does not answer"):
        left_alone()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("it is wrong"), "it is wrong"),
        (OSError(errno.ENOSPC, "No space left", "nowhere/file"), "cannot use nowhere/file: No space left"),
    ],
)
def test_others_hear_why_a_process_ends(store: dist.Store, error: Exception, said: str) -> None:
    with pytest.raises(type(error)), end_told():
        raise error
    with pytest.raises(PeerLostError, match=f"^process 0 on .* has ended: {said}"):
        left_alone()


def test_a_process_that_is_left_alone_is_no_cause(store: dist.Store) -> None:
    with pytest.raises(PeerLostError), end_told():
        left_alone()
    assert not store.check([distributed.ENDED])


def test_behind_a_cut_network_nothing_is_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    as_one_of_two(monkeypatch, Silent())
    with pytest.raises(PeerLostError, match="the network between"):
        left_alone()


def test_a_process_alone_tells_nobody() -> None:
    with pytest.raises(InputError, match="it is wrong"), end_told():
        raise InputError("it is wrong")

"""What ranks say of each other when one is missing, with a store that lies in this process."""

import threading

import pytest
import torch.distributed as dist

from common.errors import PeerLostError
from training import distributed
from training.distributed import Distributed


class SilentStore(dist.HashStore):
    """Behind a network that has been cut: a question is never answered."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of two ranks, of which this is the first."""
    store = dist.HashStore()
    store.set("host of 1", "elsewhere")
    use_store(monkeypatch, store)
    return store


def use_store(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "_store", lambda: store)
    monkeypatch.setattr(distributed, "PEER_TIMEOUT_S", 0.2)


def fail_as_main_of_two(error: Exception) -> None:
    rank = Distributed("cpu")
    rank._host_group = dist.GroupMember.NON_GROUP_MEMBER  # anything but None: there is a process group
    try:
        raise error
    except Exception as raised:
        rank.__exit__(type(raised), raised, None)


def lose_peer() -> None:
    fail_as_main_of_two(RuntimeError("[gloo] Connection closed by peer"))


def test_behind_a_cut_network_nothing_is_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(monkeypatch, SilentStore())
    with pytest.raises(PeerLostError, match="the network between"):
        lose_peer()


def test_a_single_rank_answers_when_it_is_asked() -> None:
    number = 1
    with Distributed("cpu") as alone:
        wait = alone.async_max(lambda: number)
        number = 2
        assert wait() == 2
        assert alone.gather(3) == [3]

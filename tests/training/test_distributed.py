"""What ranks say of each other when one is missing; others are in test_ranks.py."""

import threading

import pytest
import torch.distributed as dist

from adamae.common.errors import PeerLostError
from adamae.training import distributed
from adamae.training.distributed import Distributed


class SilentStore(dist.HashStore):
    """Behind a network that has been cut: a question is never answered."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False


def test_behind_a_cut_network_nothing_is_waited_for_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "_store", SilentStore)
    monkeypatch.setattr(distributed, "PEER_TIMEOUT_S", 0.2)
    rank = Distributed("cpu")
    rank._host_group = (
        dist.GroupMember.NON_GROUP_MEMBER
    )  # anything but None: there is a process group
    with pytest.raises(PeerLostError, match="the network between"):
        rank.__exit__(RuntimeError, RuntimeError("[gloo] Connection closed by peer"), None)


def test_a_single_rank_answers_when_it_is_asked() -> None:
    number = 1
    with Distributed("cpu") as alone:
        wait = alone.begin_max(lambda: number)
        number = 2
        assert wait() == 2
        assert alone.gather(3) == [3]

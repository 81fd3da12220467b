"""Ranks of which one is missing, without processes; tests with processes are in test_ranks.py."""

import socket
import threading

import pytest
import torch.distributed as dist

from adamae.common.errors import InputError, PeerLostError
from adamae.training import distributed
from adamae.training.distributed import Distributed


class SilentStore(dist.HashStore):
    """A store behind a network that has been cut, which never answers."""

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
    # Anything but None says that there is a process group.
    rank._host_group = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(PeerLostError, match="the network between"):
        rank.__exit__(RuntimeError, RuntimeError("[gloo] Connection closed by peer"), None)


def test_processes_of_srun_that_do_not_know_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="srun has started 4 processes"):
        Distributed("cpu")
    # As launch/slurm.sbatch starts them.
    monkeypatch.setenv("RANK", "3")
    assert Distributed("cpu").rank == 3


def test_ranks_that_do_not_meet_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", port)
        message = f"do not meet at 127.0.0.1:{port} .*in use"
        with pytest.raises(PeerLostError, match=message) as failure, Distributed("cpu", 10):
            pass
    assert "\n" not in str(failure.value)


def test_a_single_rank_answers_when_it_is_asked() -> None:
    number = 1
    with Distributed("cpu") as alone:
        wait = alone.begin_max(lambda: number)
        number = 2
        assert wait() == 2
        assert alone.gather(3) == [3]

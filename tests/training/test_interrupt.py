"""Requests to stop: kept until they can be granted, or granted at once."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from training.interrupt import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield StopRequest(torch.device("cpu"))
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_waits_and_a_second_one_does_not(stop, number, capfd):
    os.kill(os.getpid(), number)
    assert stop.granted(may_talk=False)
    assert "saved" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_with_nothing_to_lose_a_request_is_granted_where_it_comes(stop):
    assert not stop.granted(may_talk=True)
    with pytest.raises(KeyboardInterrupt), stop.at_once():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_request_that_came_before_is_granted_first(stop):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop.at_once():
        pytest.fail("went on")


def test_after_the_block_a_request_waits_again(stop):
    with stop.at_once():
        pass
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.granted(may_talk=False)

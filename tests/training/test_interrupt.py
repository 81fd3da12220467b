"""Requests to stop: kept until a step is over, granted where a process waits, or granted at once."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from training import interrupt
from training.interrupt import SIGNALS, StopRequest


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # nohup has one of them ignored, and a run keeps to that
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stop(handlers) -> StopRequest:
    return StopRequest(torch.device("cpu"))


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_request_ends_the_next_wait(stop, number, capfd):
    assert stop.next_of(iter([1])) == 1
    send(number)
    assert stop.next_of(iter([2])) is None
    assert "saved" in capfd.readouterr().err


def test_a_request_ends_a_wait_under_way(stop):
    def never() -> Iterator[int]:
        send(signal.SIGUSR1)
        time.sleep(30)
        yield 1

    started = time.monotonic()
    assert stop.next_of(never()) is None
    assert time.monotonic() - started < 20
    send(signal.SIGUSR1)  # outside of a wait it raises nothing


def test_many_requests_are_one_and_only_a_second_ctrl_c_ends_the_run_at_once(stop, monkeypatch):
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        send(number)
    send(signal.SIGINT)
    send(signal.SIGINT)  # torchrun's copy of the same
    monkeypatch.setattr(interrupt, "APART_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_first_ctrl_c_after_a_request_of_the_scheduler_lets_it_save(stop):
    send(signal.SIGTERM)
    send(signal.SIGINT)
    assert stop.next_of(iter([1])) is None


def test_what_nohup_ignores_stays_ignored(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(torch.device("cpu"))
    send(signal.SIGHUP)
    assert stop.next_of(iter([1])) == 1


def test_a_terminal_that_has_gone_does_not_take_the_run_with_it(stop):
    kept = os.dup(2)
    try:
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        os.close(reader)
        send(signal.SIGHUP)
        os.write(2, b"the next line of the progress bar")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert stop.next_of(iter([1])) is None


def test_with_nothing_to_lose_a_request_is_granted_where_it_comes(stop):
    with pytest.raises(KeyboardInterrupt), stop.at_once():
        send(signal.SIGINT)


def test_a_request_that_came_before_is_granted_first(stop):
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop.at_once():
        pytest.fail("went on")


def test_after_the_block_a_request_waits_again(stop):
    with stop.at_once():
        pass
    send(signal.SIGINT)
    assert stop.next_of(iter([1])) is None

"""Requests to stop wait for the end of a step, or end the run at once if nothing would be lost."""

import os
import signal
from collections.abc import Iterator

import pytest

from adamae.training import stop
from adamae.training.stop import SIGNALS, StopRequest


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    """Install the handlers, as in a run whose loop has begun."""
    # The tests may run under nohup, which has SIGHUP ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequest() as request:
        request.defer = True
        yield request
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_said(
    request_: StopRequest, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    send(number)
    assert request_.is_set
    assert "saved" in capfd.readouterr().err


def test_many_signals_are_one_and_only_a_second_ctrl_c_ends_the_run_at_once(
    request_: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "DEBOUNCE_S", 1000.0)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        send(number)
    send(signal.SIGINT)
    # torchrun forwards the same Ctrl-C.
    send(signal.SIGINT)
    monkeypatch.setattr(stop, "DEBOUNCE_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_at_once_a_signal_ends_the_run_also_one_that_came_before(request_: StopRequest) -> None:
    # During an evaluation in the loop.
    with pytest.raises(KeyboardInterrupt), request_.allow_interrupt():
        send(signal.SIGTERM)
    assert not request_.is_set
    # Before the loop.
    request_.defer = False
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    assert not request_.is_set
    # Before an evaluation.
    request_.defer = True
    send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), request_.allow_interrupt():
        pytest.fail("went on")


def test_what_nohup_ignores_stays_ignored_and_handlers_are_restored() -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as request:
        request.defer = True
        send(signal.SIGHUP)
        assert not request.is_set
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == interrupt


def test_a_terminal_that_has_gone_does_not_take_the_run_with_it(request_: StopRequest) -> None:
    kept = os.dup(2)
    # stderr is a pipe that nobody reads.
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
    assert request_.is_set

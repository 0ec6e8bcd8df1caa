"""Signals are queued while tasks run, and handlers restored afterwards."""

from __future__ import annotations

import signal
import threading

import pytest

from stratagem.launch.restart.task_group import CaughtSignals


@pytest.fixture
def handlers():
    """A handler for each signal, which would notice it; put back afterwards."""
    seen: list[int] = []
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names}
    for signum in before:
        signal.signal(signum, lambda signum, _: seen.append(signum))
    yield seen
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_kept_in_order(handlers, ending) -> None:
    with CaughtSignals() as caught:
        for signum in (signal.SIGUSR2, ending, signal.SIGUSR1):
            assert caught.ending is (ending if signum == signal.SIGUSR1 else None)
            signal.raise_signal(signum)
        assert caught.take() == [signal.SIGUSR2, ending, signal.SIGUSR1]
        assert caught.take() == []
        assert handlers == []
    signal.raise_signal(ending)
    assert handlers == [ending]


def test_first_signal_that_ends_is_the_one_to_tell(handlers) -> None:
    with CaughtSignals() as caught:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert caught.ending is signal.SIGTERM


def test_ignored_signal_stays_ignored(handlers) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with CaughtSignals() as caught:
        signal.raise_signal(signal.SIGHUP)
        assert caught.take() == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_other_thread_catches_nothing_and_changes_nothing(handlers) -> None:
    before, inside = signal.getsignal(signal.SIGTERM), []

    def catch() -> None:
        with CaughtSignals():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    assert inside == [before]

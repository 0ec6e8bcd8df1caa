"""SIGTERM as notice, and what there was before it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from stratagem.keras.callbacks.checkpoint_loop import StopNotice


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_notice_ends_a_wait_and_the_handler_goes() -> None:
    with StopNotice() as notice:
        assert not notice.is_given
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        sender.start()
        notice.wait(60)
        sender.join()
        assert notice.is_given
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_wait_without_notice_ends_too() -> None:
    with StopNotice() as notice:
        notice.wait(0.01)
        assert not notice.is_given


def test_handler_goes_when_an_error_comes() -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"), StopNotice():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handler_of_the_program_stays() -> None:
    seen = []
    signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    with StopNotice() as notice:
        signal.raise_signal(signal.SIGTERM)
        assert not notice.is_given
    assert seen == [signal.SIGTERM]


def test_thread_gets_no_notice_and_may_wait() -> None:
    seen = []

    def work() -> None:
        with StopNotice() as notice:
            notice.wait(0.01)
            seen.append((notice.is_given, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, signal.SIG_DFL)]


def test_second_one_would_end_the_process() -> None:
    with StopNotice():
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

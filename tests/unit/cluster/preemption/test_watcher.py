"""Detection of failures that are due to preemption."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from stratagem.cluster.preemption.configuration import PreemptionWatcher, TerminationConfig
from stratagem.cluster.preemption.signals import SignalSource


def watcher_with_grace(grace_s: float) -> PreemptionWatcher:
    source = SignalSource(time_left_s=lambda: grace_s)
    return PreemptionWatcher(TerminationConfig(sources=[source]))


def test_message_tells_of_a_preemption(received) -> None:
    with PreemptionWatcher() as watcher:
        assert watcher.preemption_message is None
        signal.raise_signal(signal.SIGTERM)
        message = watcher.preemption_message
        assert message is not None
        assert message.startswith("SIGTERM was sent to process")
    assert received == []
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert watcher.preemption_message == message


def test_error_of_the_source_is_raised() -> None:
    failed = threading.Event()

    def watch() -> bool:
        failed.set()
        raise OSError("no such file: /run/notice")

    with PreemptionWatcher(TerminationConfig(watch)) as watcher:
        assert failed.wait(60)
        for thread in threading.enumerate():
            if thread.name == "stratagem-notice-poll":
                thread.join(60)
        with pytest.raises(OSError, match="no such file: /run/notice"):
            _ = watcher.preemption_message
        with pytest.raises(OSError, match="no such file"):
            watcher.block_until_worker_exit()


def test_machine_without_notice_is_not_waited_for() -> None:
    with watcher_with_grace(3600.0) as watcher:
        watcher.block_until_worker_exit()
        assert watcher.preemption_message is None


def test_notice_that_tells_no_time_is_not_waited_for() -> None:
    with PreemptionWatcher() as watcher:
        signal.raise_signal(signal.SIGTERM)
        watcher.block_until_worker_exit()
        assert watcher.preemption_message is not None


def test_machine_that_got_notice_is_waited_for() -> None:
    with watcher_with_grace(0.05) as watcher:
        before_s = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        watcher.block_until_worker_exit()
        assert time.monotonic() >= before_s + 0.05


def test_waiting_ends_with_the_watcher() -> None:
    with watcher_with_grace(3600.0) as watcher:
        signal.raise_signal(signal.SIGTERM)
        thread = threading.Thread(target=watcher.block_until_worker_exit)
        thread.start()
    thread.join(60)
    assert not thread.is_alive()

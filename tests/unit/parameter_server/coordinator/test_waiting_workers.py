"""Workers that wait for closures, and the one that is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from stratagem.parameter_server.coordinator.waiting_workers import WaitingWorkers


class Waiting:
    """Workers in threads of their own, each of which waits once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.workers = WaitingWorkers(self.lock)
        self.woken: list[int] = []
        self._changed = threading.Condition(self.lock)

    def begin(self, worker: int, is_busy: Callable[[], bool] = lambda: False) -> None:
        """Returns once the worker waits."""
        waits = threading.Event()

        def wait() -> None:
            with self.lock:
                waits.set()  # others get the lock once it waits
                self.workers.wait(worker, is_busy)
                self.woken.append(worker)
                self._changed.notify_all()

        threading.Thread(target=wait, daemon=True).start()
        assert waits.wait(120)
        with self.lock:
            pass

    def require_woken(self, wanted: list[int], wake: Callable[..., Any], *args: Any, **kwargs: Any):
        """Calls a method, which wakes these workers."""
        with self.lock:
            before = len(self.woken)
            wake(*args, **kwargs)
            assert self._changed.wait_for(lambda: len(self.woken) >= before + len(wanted), 120)
            assert not self._changed.wait_for(lambda: len(self.woken) > before + len(wanted), 0.02)
            assert self.woken[before:] == wanted


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_last_idle_worker_comes_first_and_then_the_last_busy_one(waiting) -> None:
    workers = waiting.workers
    for worker in (3, 1):
        waiting.begin(worker)
    for worker in (0, 2):
        waiting.begin(worker, lambda: True)
    for wanted in ([1], [3], [2], [0], []):
        waiting.require_woken(wanted, workers.wake_one, may_be_busy=True)


def test_busy_worker_is_left_alone_if_it_may_not_be_busy(waiting) -> None:
    waiting.begin(0, lambda: True)
    waiting.require_woken([], waiting.workers.wake_one, may_be_busy=False)
    waiting.require_woken([0], waiting.workers.wake, 0)
    waiting.require_woken([], waiting.workers.wake, 0)


def test_one_worker_is_woken_at_a_time(waiting) -> None:
    for worker in (0, 1):
        waiting.begin(worker)

    def wake_twice() -> None:
        for _ in range(2):
            waiting.workers.wake_one(may_be_busy=True)

    waiting.require_woken([1], wake_twice)
    waiting.require_woken([0], waiting.workers.wake_one, may_be_busy=True)


def test_busy_worker_that_has_finished_is_idle(waiting) -> None:
    is_busy = True
    waiting.begin(0, lambda: is_busy)
    waiting.workers.note_finished(0)
    waiting.require_woken([], waiting.workers.wake_one, may_be_busy=False)
    is_busy = False
    waiting.workers.note_finished(0)
    waiting.require_woken([0], waiting.workers.wake_one, may_be_busy=False)


def test_all_are_woken(waiting) -> None:
    waiting.begin(0)
    waiting.begin(1, lambda: True)
    with waiting.lock:
        waiting.workers.wake_all()
        waiting._changed.wait_for(lambda: len(waiting.woken) == 2, 120)
    assert sorted(waiting.woken) == [0, 1]

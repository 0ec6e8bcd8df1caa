"""Threads of the coordinator that keep one worker busy."""

from __future__ import annotations

import threading
import time
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.coordinator.closure_queue import ClosureQueue
from stratagem.parameter_server.coordinator.coordinated_workers import WorkerLink
from stratagem.parameter_server.coordinator.remote_value import Closure
from stratagem.parameter_server.coordinator.shipping import MAX_UNANSWERED, calls_in
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.clusters import coordinated


def test_counts_that_cannot_be_added_are_an_error_of_the_function(monkeypatch) -> None:
    def fail(link: WorkerLink, counted: Any) -> None:
        raise MemoryError("counts of a metric")

    with coordinated() as coordinator:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerLink, "_count", fail)
            with coordinator.strategy.scope():
                metric = keras.metrics.Sum()
            coordinator.schedule(lambda: metric.update_state(1.0))
            with pytest.raises(MemoryError, match="counts of a metric"):
                assert coordinator.wait(120)
        assert coordinator.fetch(coordinator.schedule(lambda: 2)) == 2


def test_function_sent_after_a_lost_one_runs(monkeypatch) -> None:
    """The worker keeps it for the lost one, which another worker has run meanwhile."""
    ask, put_back = Connections.ask, ClosureQueue.put_back
    is_second_sent = threading.Event()
    lost: list[int] = []

    def ask_without_the_first(
        self: Connections, server: int, message: Message, **limits: Any
    ) -> Message:
        if message.kind == "run" and not lost:
            if message.fields["order"] == 0:
                assert is_second_sent.wait(120)
                lost.extend(call.closure for call in calls_in(message))
                raise UnavailableError("lost in transit")
            is_second_sent.set()
        return ask(self, server, message, **limits)

    def finish_elsewhere(queue: ClosureQueue, closure: Closure) -> None:
        if closure.number in lost:
            queue.finish(closure, None)
        else:
            put_back(queue, closure)

    with coordinated() as coordinator:
        monkeypatch.setattr(Connections, "ask", ask_without_the_first)
        monkeypatch.setattr(ClosureQueue, "put_back", finish_elsewhere)
        # The second is sent at once, since a third waits.
        values = [coordinator.schedule(lambda: 7) for _ in range(3)]
        assert coordinator.wait(60.0)
        assert [coordinator.fetch(value) for value in values] == [None, 7, 7]
        assert lost


def test_short_functions_travel_in_groups(monkeypatch) -> None:
    ask, sizes = Connections.ask, list[int]()

    def counted_ask(self: Connections, server: int, message: Message, **limits: Any) -> Message:
        if message.kind == "run":
            sizes.append(len(message.fields["calls"]))
        return ask(self, server, message, **limits)

    monkeypatch.setattr(Connections, "ask", counted_ask)
    with coordinated() as coordinator:
        values = [coordinator.schedule(pow, args=(2, power)) for power in range(500)]
        assert coordinator.wait(60.0)
        assert coordinator.fetch(values) == [2**power for power in range(500)]
        assert sum(sizes) == 500
        assert max(sizes) > 4

        # Those before the one that fails end.
        values.clear()

        def schedule_all() -> None:
            for i in range(500):
                values.append(coordinator.schedule(divmod, args=(1, 300 - i)))
            coordinator.join()

        with pytest.raises(ZeroDivisionError):  # by schedule() if the worker is fast
            schedule_all()
        assert coordinator.fetch(values[:300]) == [divmod(1, 300 - i) for i in range(300)]


def test_functions_whose_answer_was_lost_make_their_updates_once(monkeypatch) -> None:
    """The worker goes on with later functions, whose answers arrive."""
    ask, lock = Connections.ask, threading.Lock()
    sent: list[int] = []
    num_sent_before: list[int] = []

    def ask_losing_an_answer(
        self: Connections, server: int, message: Message, **limits: Any
    ) -> Message:
        if message.kind != "run":
            return ask(self, server, message, **limits)
        with lock:
            sent.append(message.fields["order"])
            is_lost = len(sent) == 3
        answer = ask(self, server, message, **limits)
        if is_lost:  # a broken connection is noticed late
            until(lambda: len(sent) >= 3 + MAX_UNANSWERED - 1)
            time.sleep(0.1)  # in which no more are sent
            num_sent_before.append(len(sent))
            raise UnavailableError("the answer was lost")
        return answer

    monkeypatch.setattr(Connections, "ask", ask_losing_an_answer)
    count = 60
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            counts = sg.Variable(np.zeros(count, np.float32))

        def add(place: int) -> None:
            time.sleep(0.002)
            counts.assign_add(np.eye(count, dtype=np.float32)[place])

        for place in range(count):
            coordinator.schedule(add, args=(place,))
        with pytest.warns(RuntimeWarning, match="were not applied again"):
            coordinator.join()
        np.testing.assert_array_equal(counts.numpy(), 1)
    assert num_sent_before == [3 + MAX_UNANSWERED - 1]

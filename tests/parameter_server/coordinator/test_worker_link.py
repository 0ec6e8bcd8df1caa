"""Threads of the coordinator that keep one worker busy."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stratagem.errors import UnavailableError
from stratagem.parameter_server.coordinator.closures import Closure, ClosureQueue
from stratagem.parameter_server.coordinator.worker_link import WorkerLink
from stratagem.parameter_server.transport.connection import Connections
from stratagem.parameter_server.transport.wire import Message
from tests.parameter_server.clusters import coordinated


def test_counts_that_cannot_be_added_are_an_error_of_the_function(monkeypatch) -> None:
    def fail(link: WorkerLink, numbers: Any, counted: Any) -> None:
        raise MemoryError("counts of a metric")

    with coordinated() as coordinator:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerLink, "_count", fail)
            coordinator.schedule(lambda: 1)
            with pytest.raises(MemoryError, match="counts of a metric"):
                assert coordinator.wait(30.0)
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
                assert is_second_sent.wait(30.0)
                lost.append(message.fields["closure"])
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

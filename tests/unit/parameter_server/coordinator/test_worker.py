"""What a worker answers, message by message."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.coordinator.shipping import SentCall, ended_in, pack_calls
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.strategy.entry_points import make_worker
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.shared_with_workers import LIMIT_S, seen, ten_more

pytestmark = pytest.mark.usefixtures("nothing_shared")


class Driver:
    """Tells a worker what a coordinator would."""

    def __init__(self, strategy: Any, connections: Connections) -> None:
        self._strategy = strategy
        self._connections = connections
        self._answers: dict[int, Message] = {}

    def join(self, first_order: int = 0) -> None:
        fields = {
            "coordinator": "a name",
            "servers": self._strategy.cluster.server_addresses,
            "index": 0,
            "mode": asdict(UpdateMode()),
            "first_order": first_order,
        }
        assert self._connections.ask(0, Message("join", fields)).kind == "ok"
        function = np.frombuffer(KERAS_PACKING.pack(note_and_add, self._strategy), np.uint8)
        self._connections.ask(0, Message("function", {"number": 1}, [function]))

    def run(self, order: int, value: int = 0) -> Any:
        """What the function returns for a value; or the kind of another answer."""
        answer = self.run_group(order, [value])
        return answer if isinstance(answer, str) else answer[0]

    def run_group(self, order: int, values: list[Any]) -> list[Any] | str:
        """What the function returns for values, or the error; or the kind of another answer."""
        calls = [
            SentCall(1, order, False, KERAS_PACKING.pack(((value,), {}), self._strategy))
            for value in values
        ]
        answer = self._connections.ask(
            0, pack_calls(calls, {"order": order, "first_open": 0, "num_writes": 0})
        )
        if answer.kind != "ran":
            return answer.kind
        ended = list(ended_in(answer))
        assert all(one.duration_s >= 0 for one in ended)
        return [
            KERAS_PACKING.unpack(one.packed, self._strategy)
            if one.trace is None
            else pickle.loads(one.packed)
            for one in ended
        ]

    def run_later(self, order: int, value: int = 0) -> tuple[threading.Thread, list[Any]]:
        """A thread that asks, and its answer."""
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(self.run(order, value)), daemon=True
        )
        thread.start()
        return thread, answers


def note_and_add(value: int) -> int:
    seen.append(value)
    return ten_more(value)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with local_strategy() as strategy:
        keys = strategy.cluster.keys
        with (
            contextlib.closing(make_worker(keys, devices=["cpu:0"])) as worker,
            contextlib.closing(Connections(keys, [worker.address], peers="Worker")) as connections,
        ):
            yield Driver(strategy, connections)


def test_functions_run_in_the_order_in_which_they_were_sent(driver) -> None:
    driver.join()
    second, answers = driver.run_later(1, 5)
    second.join(0.2)
    assert answers == []
    assert driver.run(0, 4) == 14
    second.join(LIMIT_S)
    assert answers == [15]
    assert seen == [4, 5]


def test_group_ends_with_the_first_function_that_fails(driver) -> None:
    driver.join()
    assert driver.run_group(0, [1, 2, 3]) == [11, 12, 13]
    first, error = driver.run_group(1, [4, "no number", 5])
    assert first == 14
    assert isinstance(error, TypeError)
    assert seen == [1, 2, 3, 4, "no number"]
    assert driver.run(2, 6) == 16


def test_function_whose_answer_was_lost_does_not_run_again(driver) -> None:
    driver.join()
    assert driver.run(0, 4) == 14
    assert driver.run(0, 4) == 14
    assert seen == [4]


def test_what_was_sent_before_the_worker_joined_anew_is_to_be_sent_again(driver) -> None:
    driver.join(first_order=3)
    assert driver.run(2) == "again"
    assert driver.run(3, 1) == 11
    assert seen == [1]


def test_what_waits_for_a_number_that_was_lost_is_answered_when_the_worker_joins_anew(
    driver,
) -> None:
    driver.join()
    waiting, answers = driver.run_later(1, 5)  # 0 was lost on its way
    waiting.join(0.2)
    assert answers == []
    driver.join(first_order=2)
    waiting.join(LIMIT_S)
    assert answers == ["again"]
    assert driver.run(2, 6) == 16
    assert seen == [6]

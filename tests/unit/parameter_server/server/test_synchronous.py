"""Updates of several workers at once."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest

from stratagem.parameter_server.server.pushes import (
    Contribution,
    SynchronousSums,
    SynchronousUpdates,
)
from stratagem.parameter_server.server.store import ServerVariables
from tests.unit.parameter_server.server.test_store import make_store
from tests.unit.parameter_server.server.update_rules import Momentum


def make(num_needed: int) -> tuple[ServerVariables, SynchronousUpdates]:
    store = make_store(v=np.zeros(3, np.float32), table=np.zeros((10, 2), np.float32))
    store.set_rule(Momentum(), ["v", "table"])
    return store, SynchronousUpdates(store, num_needed)


def of(client: str, version: int, answers: list, value: float = 1.0, rows=()) -> Contribution:
    ids = np.array(rows, np.int64)
    return Contribution(
        client,
        version,
        {"v": np.full(3, value, np.float32)},
        {"table": (ids, np.ones((len(ids), 2), np.float32))},
        lambda version, *, is_used: answers.append((client, version, is_used)),
        lambda error: answers.append((client, error)),
    )


def test_update_is_that_of_the_sum_and_all_are_answered_then() -> None:
    store, updates = make(3)
    answers: list = []
    updates.add(of("a", 0, answers, 1.0, [1, 2]))
    updates.add(of("b", 0, answers, 2.0, [2]))
    assert answers == []
    assert store.version == 0
    updates.add(of("c", 0, answers, 4.0))
    assert answers == [("a", 1, True), ("b", 1, True), ("c", 1, True)]
    v, table = store.pull(["v", "table"])
    np.testing.assert_allclose(v, -0.7, rtol=1e-6)
    wanted = np.zeros((10, 2))
    wanted[1], wanted[2] = -0.1, -0.2
    np.testing.assert_allclose(table, wanted, rtol=1e-6)


def test_sum_does_not_depend_on_who_comes_first() -> None:
    values = {"a": 1e8, "b": 1.0, "c": -1e8}
    results = set()
    for order in itertools.permutations(values):
        store, updates = make(3)
        for client in order:
            updates.add(of(client, 0, [], values[client]))
        results.add(store.pull(["v"])[0].tobytes())
    assert len(results) == 1


def test_update_that_cannot_be_made_is_reported_to_all_and_the_next_one_is() -> None:
    store, updates = make(2)
    answers: list = []
    updates.add(of("a", 0, answers, rows=[10]))
    with pytest.raises(IndexError, match="of 'table' were requested"):
        updates.add(of("b", 0, answers))
    assert [(worker, type(error)) for worker, error in answers] == [
        ("a", IndexError),
        ("b", IndexError),
    ]
    updates.add(of("a", 0, answers))
    updates.add(of("b", 0, answers))
    assert store.version == 1


def test_workers_in_threads_make_as_many_updates_as_steps() -> None:
    store, updates = make(4)

    def work(client: str) -> None:
        for step in range(25):
            is_answered = threading.Event()

            def answer(version: int, *, is_used: bool, event=is_answered) -> None:
                event.set()

            updates.add(dataclasses.replace(of(client, step, []), answer=answer))
            assert is_answered.wait(120)

    threads = [threading.Thread(target=work, args=(client,)) for client in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.version == 25
    assert updates.num_discarded == 0


def test_counters_are_set_with_the_update_to_the_largest_of_all() -> None:
    store, updates = make(2)
    store.set_rule(Momentum("other"), ["v"], "other")
    answers: list = []
    for client, count in (("a", 7.0), ("b", 5.0)):
        assert store.scalars["other.count"] == 0
        updates.add(dataclasses.replace(of(client, 0, answers), scalars={"other.count": count}))
    assert store.scalars["other.count"] == 7


def test_assigned_values_are_updated_once_as_their_mean() -> None:
    store, updates = make(2)
    for client, value in (("a", 1.0), ("b", 3.0)):
        own = {"v": (np.full(3, value, np.float32), 0), "table": (np.ones((10, 2), np.float32), 1)}
        updates.add(dataclasses.replace(of(client, 0, []), assigned=own))
    v, table = store.pull(["v", "table"])
    np.testing.assert_allclose(v, 2.0 - 0.2, rtol=1e-6)
    np.testing.assert_allclose(table, 1.0)


class Asked:
    """Sums of some workers, and their answers."""

    def __init__(self, num_needed: int) -> None:
        self.store, _ = make(num_needed)
        self.sums = SynchronousSums(self.store)
        self.sums.expect(num_needed)
        self.answers: list = []

    def ask(self, worker: str, value: float, place: int = 0) -> None:
        key = (self.store.version, place)
        answer = lambda total: self.answers.append((worker, total.tolist()))  # noqa: E731
        self.sums.add(worker, key, np.float32([value]), answer)


def test_sums_are_answered_once_all_have_asked_and_again_to_those_that_restart() -> None:
    asked = Asked(2)
    asked.ask("a", 1.0)
    asked.ask("a", 5.0, place=1)  # another sum of the same step
    assert asked.answers == []
    assert asked.sums.waiting == ["a"]
    asked.ask("b", 2.0)
    assert asked.answers == [("a", [3.0]), ("b", [3.0])]
    asked.ask("a", 1.0)  # it runs its step again
    assert asked.answers[2:] == [("a", [3.0])]
    assert asked.sums.waiting == ["a"]
    asked.ask("b", 2.0, place=1)
    assert asked.answers[3:] == [("a", [7.0]), ("b", [7.0])]
    assert asked.sums.waiting == []


def test_sums_do_not_wait_for_lost_workers_nor_outlive_their_update() -> None:
    asked = Asked(3)
    asked.ask("a", 1.0)
    asked.ask("b", 2.0)
    asked.sums.expect(2)
    assert asked.answers == [("a", [3.0]), ("b", [3.0])]
    asked.store.update({"v": np.zeros(3, np.float32)}, {})
    asked.ask("a", 10.0)
    assert len(asked.answers) == 2
    asked.sums.flush()
    assert asked.answers[2:] == [("a", [10.0])]

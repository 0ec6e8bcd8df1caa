"""Steps of an elastic group with a group and programs that are made up."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from stratagem.execution.programs import elastic_lockstep
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.execution.programs.elastic_program import RoundAbortedError
from stratagem.input.batches import take_batch


class _Group:
    num_places = 3

    def __init__(self) -> None:
        self.num_welcomes = 0

    def welcome(self) -> None:
        self.num_welcomes += 1


@pytest.fixture
def group(monkeypatch) -> _Group:
    made = _Group()
    monkeypatch.setattr(elastic_lockstep, "current_group", lambda: made)
    return made


def _topology(count: int) -> Topology:
    return Topology(tuple(jax.devices()[:count]))


class _Steps(ElasticLockstep):
    """An executor whose programs return the rows that they are given; `act` is called before."""

    def __init__(self, act: Any = lambda place: None) -> None:
        self._strategy: Any = types.SimpleNamespace(topology=_topology(3))
        self.keeps_worker_rows = False
        self.calls: list[tuple[int, Any]] = []
        self._act = act

    def program(self, fn: Any, arguments: Any) -> Any:
        self._act("program")
        return types.SimpleNamespace(run=lambda given: self._run(given))

    def _run(self, arguments: Any) -> Any:
        self._act("run")
        self.calls.append((self._strategy.topology.num_replicas, arguments))
        return arguments


def test_a_member_lost_while_a_program_is_made_changes_the_arguments(group) -> None:
    """The exchange of initial values, between trace and step, may be where it is noticed."""

    def lose(place: str) -> None:
        if place == "program":
            steps._strategy.topology = two

    two, steps = _topology(2), _Steps(lose)
    result, topology = steps._run_until_committed(
        print, lambda: [steps._strategy.topology.num_replicas]
    )
    assert (result, topology) == (2, two)
    assert steps.calls == [(2, 2)]


def test_a_step_that_a_loss_has_broken_runs_again(group) -> None:
    losses = [_topology(2), _topology(1)]

    def lose(place: str) -> None:
        if place == "run" and losses:
            steps._strategy.topology = losses.pop(0)
            raise RoundAbortedError

    steps = _Steps(lose)
    result, topology = steps._run_until_committed(
        print, lambda: [steps._strategy.topology.num_replicas]
    )
    assert (result, topology.num_replicas, group.num_welcomes) == (1, 1, 2)


@pytest.mark.parametrize(
    ("num_members", "keeps", "ends"),
    [(3, True, [32]), (2, True, [22, 32]), (1, True, [11, 22, 32]), (1, False, [32])],
)
def test_a_step_ends_where_the_rows_of_its_members_do(group, num_members, keeps, ends) -> None:
    steps = _Steps()
    steps.keeps_worker_rows = keeps
    batch = take_batch(np.arange(32.0), num_members)
    found = [0]
    while found[-1] < 32:
        found.append(steps._end(batch, found[-1], _topology(num_members)))
    assert found[1:] == ends


def test_every_row_of_a_batch_is_in_one_step(group, monkeypatch) -> None:
    """A member is lost after the first of two steps."""
    parts = []

    def placed(batches: list[Any], topology: Topology) -> Any:
        parts.append(batches[0].whole())
        return len(parts) - 1

    monkeypatch.setattr(elastic_lockstep, "place", placed)
    monkeypatch.setattr(elastic_lockstep, "batch_arguments", lambda place: place)

    def lose(place: str) -> None:
        if place == "run" and len(steps.calls) == 1:
            steps._strategy.topology = _topology(1)

    steps = _Steps(lose)
    steps._strategy.topology = _topology(2)
    steps.keeps_worker_rows = True
    steps._run_batch(print, take_batch(np.arange(32.0), 2), None)
    rows = [parts[place] for _, place in steps.calls]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(32.0))

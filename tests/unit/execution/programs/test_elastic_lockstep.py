"""Steps of an elastic group, which run again if a member is lost."""

from __future__ import annotations

import types
from typing import Any

import jax
import keras
import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from stratagem.execution.programs import elastic
from stratagem.execution.programs.elastic import (
    ElasticLockstep,
    OutsideVariables,
    RoundAbortedError,
)
from stratagem.execution.programs.program import FunctionKeys
from stratagem.input.batches import take_batch

# With a group and programs that are made up.


class _ElasticLockstepGroup:
    admissions = types.SimpleNamespace(wanted_size=None)

    def __init__(self) -> None:
        self.num_welcomes = 0

    def welcome(self) -> None:
        self.num_welcomes += 1


@pytest.fixture
def group_of_elastic_lockstep(monkeypatch) -> _ElasticLockstepGroup:
    made = _ElasticLockstepGroup()
    monkeypatch.setattr(elastic, "current_group", lambda: made)
    return made


def _topology(count: int) -> Topology:
    return Topology(tuple(jax.devices()[:count]))


class _Steps(ElasticLockstep):
    """An executor whose programs return the rows that they are given; `act` is called before."""

    def __init__(self, act: Any = lambda place: None) -> None:
        self._strategy: Any = types.SimpleNamespace(topology=_topology(3))
        self._keys, self._prepared = FunctionKeys(), set[Any]()
        self.calls: list[tuple[int, Any]] = []
        self._act = act

    def program(self, fn: Any, arguments: Any) -> Any:
        self._act("program")
        return types.SimpleNamespace(
            run=lambda given: self._run(given), is_worth_preparing=lambda **given: False
        )

    def _run(self, arguments: Any) -> Any:
        self._act("run")
        self.calls.append((self._strategy.topology.num_replicas, arguments))
        return arguments


def test_a_member_lost_while_a_program_is_made_changes_the_arguments(
    group_of_elastic_lockstep,
) -> None:
    """The exchange of initial values, between trace and step, may be where it is noticed."""

    def lose(place: str) -> None:
        if place == "program":
            steps._strategy.topology = two

    two, steps = _topology(2), _Steps(lose)
    result: Any = steps._run_until_committed(print, lambda: steps._strategy.topology.num_replicas)
    assert result == 2
    assert steps.calls == [(2, 2)]


def test_a_step_that_a_loss_has_broken_runs_again(group_of_elastic_lockstep) -> None:
    losses = [_topology(2), _topology(1)]

    def lose(place: str) -> None:
        if place == "run" and losses:
            steps._strategy.topology = losses.pop(0)
            raise RoundAbortedError

    steps = _Steps(lose)
    result: Any = steps._run_until_committed(print, lambda: steps._strategy.topology.num_replicas)
    assert (result, group_of_elastic_lockstep.num_welcomes) == (1, 2)


def test_a_batch_is_split_again_among_those_that_are_left(
    group_of_elastic_lockstep, monkeypatch
) -> None:
    parts: list[tuple[Any, int]] = []

    def placed(batches: list[Any], topology: Topology) -> None:
        parts.append((batches[0].whole(), topology.num_replicas))

    monkeypatch.setattr(elastic, "placed_batches", placed)
    monkeypatch.setattr(elastic, "batch_arguments", lambda placed: placed)

    def lose(place: str) -> None:
        if place == "run" and len(parts) == 1:
            steps._strategy.topology = _topology(1)
            raise RoundAbortedError

    steps = _Steps(lose)
    steps._strategy.topology = _topology(2)
    steps._run_batch(print, take_batch(np.arange(32.0), 2), None)
    assert [count for _, count in parts] == [2, 1]
    for rows, _ in parts:
        np.testing.assert_array_equal(rows, np.arange(32.0))


# Variables of no strategy, which processes that join receive as well.


def test_values_that_were_not_received_are_refused() -> None:
    first, second = keras.Variable(1.0), keras.Variable(2.0, name="late")
    outside = OutsideVariables()
    outside.note([first], "step")
    outside.end()
    outside.note([first], "step")
    with pytest.raises(ValueError, match="step uses variable 'late', which was made outside"):
        outside.note([second], "step")

"""Members as a user sees them, and `admit`, with a group that is made up."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep


class _Admission:
    """Joins with one call of `prepare` for each number of members that is expected."""

    def __init__(self, *, is_waiting: bool, num_sizes: int = 1) -> None:
        self.is_waiting, self._num_sizes = is_waiting, num_sizes
        self.calls: list[str] = []

    def admit(self) -> None:
        self.calls.append("admit")

    def join_loop(self, prepare: Callable[[], None]) -> None:
        for _ in range(self._num_sizes):
            prepare()
        self.calls.append("join")
        self.is_waiting = False


@pytest.fixture
def strategy() -> Any:
    """A strategy of this process alone."""
    return sg.ElasticStrategy()


@pytest.fixture
def compiled(strategy, monkeypatch) -> list[Any]:
    """Calls that the executor compiles; each has the current strategy before it."""
    calls: list[Any] = []
    executor = ElasticLockstep(strategy)
    monkeypatch.setattr(strategy, "executor", executor)
    monkeypatch.setattr(
        executor, "compile_call", lambda *call: calls.append((sg.get_strategy(), *call))
    )
    return calls


def test_a_process_alone_is_its_only_member_and_admits_nobody(strategy) -> None:
    assert strategy.members == strategy.participants == (0,)
    assert strategy.admit(print, args=(1,)) is None
    assert strategy.cluster_resolver.processes().num_processes == 1


def test_members_are_those_of_the_view_and_participants_those_of_the_last_step(strategy) -> None:
    view = types.SimpleNamespace(members=(0, 2))
    strategy._group = types.SimpleNamespace(view=view, participants=(0, 1, 2))
    assert strategy.members == (0, 2)
    assert strategy.participants == (0, 1, 2)


def test_a_member_admits_others_without_compiling(strategy, compiled) -> None:
    admission = strategy._admission = _Admission(is_waiting=False)
    strategy.admit(print, args=(1,))
    assert admission.calls == ["admit"]
    assert compiled == []


def test_a_process_that_joins_compiles_its_step_for_each_expected_size(strategy, compiled) -> None:
    admission = strategy._admission = _Admission(is_waiting=True, num_sizes=2)

    def step(x: Any, *, scale: float) -> Any:
        return x * scale

    x = np.ones(2)
    strategy.admit(step, args=(x,), kwargs={"scale": 2.0})
    assert admission.calls == ["join"]
    assert compiled == [(strategy, step, (x,), {"scale": 2.0})] * 2
    strategy.admit(step, args=(x,))
    assert admission.calls == ["join", "admit"]


def test_without_a_function_nothing_is_compiled(strategy, compiled) -> None:
    admission = strategy._admission = _Admission(is_waiting=True)
    strategy.admit()
    assert admission.calls == ["join"]
    assert compiled == []


def test_an_error_of_a_step_that_is_compiled_ends_the_call(strategy, compiled, monkeypatch) -> None:
    def fail(*call: object) -> None:
        raise TypeError("step() takes no arguments")

    monkeypatch.setattr(strategy.executor, "compile_call", fail)
    admission = strategy._admission = _Admission(is_waiting=True)
    with pytest.raises(TypeError, match="takes no arguments"):
        strategy.admit(print, args=(1,))
    assert admission.calls == []

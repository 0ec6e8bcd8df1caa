"""Checker of histories: accepts runs that keep their promises, and finds each flaw."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.observe.test_wait_clock import ticking
from validation.chaos import recording
from validation.chaos.history import Attempt, Cell, Final, History, Span, check, read_history
from validation.chaos.recording import Recorder
from validation.chaos.simulated_run import FLAWS, Simulation


def _kinds(history: History, final: Final, *, is_durable: bool = False) -> set[str]:
    return {finding.kind for finding in check(history, final, is_durable=is_durable)}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_run_that_keeps_its_promises_is_accepted(seed, is_durable) -> None:
    history, final = Simulation(seed, is_durable=is_durable).run()
    assert check(history, final, is_durable=is_durable) == []


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_of_a_run_is_found(flaw) -> None:
    """In some runs a flaw has no effect, or a lost server hides it."""
    num_found = 0
    for seed in range(30):
        simulation = Simulation(seed, is_durable=flaw == "answers early", flaw=flaw)
        history, final = simulation.run()
        kinds = _kinds(history, final, is_durable=flaw == "answers early")
        assert simulation.num_flaws or not kinds
        num_found += FLAWS[flaw] in kinds
    assert num_found >= 2


def _update(number: int, begun_s: float, ended_s: float = math.inf, **others: Any) -> Attempt:
    outcome = "unknown" if ended_s == math.inf else "ok"
    fields = {"client": "one", "cells": ("adds",), "outcome": outcome, **others}
    return Attempt(number=number, begun_s=begun_s, ended_s=ended_s, **fields)


def _state(*counts: float) -> Final:
    numbers = range(len(counts))
    return Final({"adds": Cell("assign_add", dict(enumerate(counts)), dict.fromkeys(numbers, 0))})


def test_update_without_an_answer_may_be_made_or_not() -> None:
    history = History([_update(0, 1), _update(1, 2)])
    assert _kinds(history, _state(0, 1), is_durable=True) == set()


def test_refused_or_unsent_update_is_not_made() -> None:
    history = History([_update(0, 1, 2, outcome="fail")])
    assert _kinds(history, _state(0, 0)) == set()
    assert _kinds(history, _state(1, 0)) == {"unsent"}
    assert _kinds(history, _state(0, 1)) == {"unsent"}
    assert _kinds(history, _state()) == {"incomplete"}


@pytest.mark.parametrize("count", [2, -1, 0.5])
def test_place_counts_whole_updates(count) -> None:
    assert _kinds(History([_update(0, 1, 2)]), _state(count)) == {"doubled"}


def test_loss_needs_a_lost_server_after_the_last_entry() -> None:
    history = History([_update(0, 1, 2)], crashes={0: [Span(8, 9)]})
    assert _kinds(history, _state(0)) == set()
    assert _kinds(history, _state(0), is_durable=True) == {"lost"}
    too_early = History(history.updates, crashes={0: [Span(0.1, 0.2)]})
    assert _kinds(too_early, _state(0)) == {"lost"}
    with_entry = History(history.updates, entries=[Span(3, 4)], crashes=history.crashes)
    assert _kinds(with_entry, _state(0)) == {"lost"}
    concurrent = History(history.updates, entries=[Span(1.5, 4)], crashes=history.crashes)
    assert _kinds(concurrent, _state(0)) == set()
    cut = Final(_state(0).cells, cut_servers=frozenset([0]))
    assert _kinds(with_entry, cut, is_durable=True) == set()


def test_lost_server_keeps_no_later_update() -> None:
    crashes = {0: [Span(8, 9)]}
    assert _kinds(History([_update(0, 1, 2), _update(1, 3, 4)], crashes=crashes), _state(0, 1)) == {
        "gap"
    }
    concurrent = [_update(0, 1, 5), _update(1, 3, 4)]
    assert _kinds(History(concurrent, crashes=crashes), _state(0, 1)) == set()
    after = [_update(0, 1, 2), _update(1, 3, 10)]
    assert _kinds(History(after, crashes=crashes), _state(0, 1)) == set()


def test_register_has_one_of_the_last_values() -> None:
    writes = [
        _update(number, begun_s, begun_s + 2, cells=("register",))
        for number, begun_s in [(1, 1), (2, 4), (3, 5)]
    ]
    for value, kinds in ((1, {"register"}), (2, set()), (3, set()), (4, {"register"})):
        assert _kinds(History(writes), Final({}, register=value)) == kinds
    lost = History(writes, crashes={0: [Span(8, 9)]})
    assert _kinds(lost, Final({}, register=1)) == set()
    assert _kinds(lost, Final({}, register=1), is_durable=True) == {"register"}


def test_function_has_one_result_after_all_its_updates() -> None:
    history = History([_update(0, 1)], done={0: ["one", "two"]})
    findings = check(history, Final(_state(1).cells, metric=2), is_durable=False)
    assert [str(finding) for finding in findings] == [
        "result: function 0 has 2 results",
        "result: function 0 ended before its update of adds",
        "metric: 1 functions ended, the metric counted 2",
    ]


def test_records_become_a_history(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "time", ticking())
    recorder = Recorder(tmp_path)
    with recorder.span("function", number=3):
        with recorder.span("update", number=3, cells=["adds"]):
            pass
        with pytest.raises(IndexError), recorder.span("update", (IndexError,), number=4):
            raise IndexError
        with pytest.raises(TimeoutError), recorder.span("update", (IndexError,), number=5):
            raise TimeoutError
    with recorder.span("entry"):
        pass
    recorder.note("lost", server=1, begun_s=0.5, is_counted=False)
    recorder.note("done", number=3, client=recorder.client)
    Recorder(tmp_path).note("invoke", what="update", span=1, number=6)
    (path, _) = sorted(tmp_path.iterdir())
    with path.open("ab") as file:
        file.write(b'{"event": "inv')  # killed while it wrote

    history = read_history(tmp_path)
    outcomes = {one.number: one.outcome for one in history.updates}
    assert outcomes == {3: "ok", 4: "fail", 5: "unknown", 6: "unknown"}
    assert len({one.client for one in history.updates}) == 2
    assert [(one.number, one.outcome) for one in history.functions] == [(3, "ok")]
    assert len(history.entries) == 1
    assert history.done == {3: [recorder.client]}
    (crash,) = history.crashes_of(1)
    assert (crash.begun_s, crash.is_counted) == (0.5, False)


def test_what_a_stopped_worker_does_after_the_end_is_no_history(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "time", ticking())
    recorder = Recorder(tmp_path)
    with recorder.span("update", number=0, cells=["adds"]):
        recorder.note("end")
    with recorder.span("update", number=0, cells=["adds"]):
        pass
    assert [one.outcome for one in read_history(tmp_path).updates] == ["ok"]

"""Exchanges on process 0: complete, out of order, overdue."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stratagem.group.hub import ExchangeReply, Exchanges
from stratagem.group.verdict import Activity, GroupLimits, MemberView, ProgramPosition, Verdict

_LABELS = ["worker 0", "worker 1", "worker 2"]
_LIMITS = GroupLimits(stuck_s=120)


def _message(
    name: str, value: Any, number: int = 0, limit_s: float | None = 300.0, stream: str = "main"
) -> Any:
    return {
        "stream": stream,
        "number": number,
        "name": name,
        "value": value,
        "limit_s": limit_s,
        "setting": "STRATAGEM_BARRIER_TIMEOUT_S",
    }


def _views(*kinds: Activity, unmoved_s: float = 200.0) -> list[MemberView]:
    return [
        MemberView(label, ProgramPosition(kind, "d", 3), unmoved_s=unmoved_s)
        for label, kind in zip(_LABELS, kinds, strict=True)
    ]


def test_values_come_out_in_the_order_of_the_processes_when_all_are_there() -> None:
    exchanges = Exchanges(_LABELS)
    assert exchanges.add(2, _message("save", "c"), 0.0) is None
    assert exchanges.add(0, _message("save", "a"), 1.0) is None
    reply = exchanges.add(1, _message("save", "b"), 2.0)
    assert reply == ExchangeReply(
        [0, 1, 2],
        {
            "kind": "exchanged",
            "stream": "main",
            "number": 0,
            "runs": [("a", 1), ("b", 1), ("c", 1)],
        },
    )
    assert (
        exchanges.overdue(_views(Activity.PYTHON, Activity.PYTHON, Activity.PYTHON), _LIMITS, 9e9)
        is None
    )


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ([None] * 3, [(None, 3)]),
        ([{"a": [1]}, {"a": [2]}, {"a": [2]}], [({"a": [1]}, 1), ({"a": [2]}, 2)]),
        ([1, True, 1.0], [(1, 1), (True, 1), (1.0, 1)]),
        ([[1], [True], [1.0]], [([1], 1), ([True], 1), ([1.0], 1)]),
        ([0.0, -0.0, -0.0], [(0.0, 1), (-0.0, 2)]),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {}], [({"a": 1, "b": 2}, 2), ({}, 1)]),
    ],
    ids=str,
)
def test_equal_values_of_successive_processes_are_sent_once(values, runs) -> None:
    exchanges = Exchanges(_LABELS)
    *_, reply = [exchanges.add(i, _message("a", value), 0.0) for i, value in enumerate(values)]
    assert isinstance(reply, ExchangeReply)
    told = reply.message["runs"]
    assert json.dumps(told, sort_keys=True) == json.dumps(runs, sort_keys=True)


def test_calls_of_different_numbers_do_not_mix() -> None:
    exchanges = Exchanges(_LABELS)
    for process_id in (0, 1):
        exchanges.add(process_id, _message("a", process_id, number=0), 0.0)
    exchanges.add(0, _message("b", 10, number=1), 0.0)
    reply = exchanges.add(2, _message("a", 2, number=0), 0.0)
    assert isinstance(reply, ExchangeReply)
    assert reply.message["runs"] == [(0, 1), (1, 1), (2, 1)]


def test_another_name_at_the_same_place_names_both_calls() -> None:
    exchanges = Exchanges(_LABELS)
    exchanges.add(0, _message("model.save", None), 0.0)
    verdict = exchanges.add(2, _message("the random state", None), 0.0)
    assert isinstance(verdict, Verdict)
    assert verdict.error == "RuntimeError"
    assert "worker 2 called 'the random state' while worker 0 called 'model.save'" in (
        verdict.message
    )


def test_missing_process_is_named_with_the_limit_and_its_setting() -> None:
    exchanges = Exchanges(_LABELS)
    exchanges.add(0, _message("save", None, limit_s=10.0), 100.0)
    views = _views(Activity.EXCHANGE, Activity.PYTHON, Activity.COMPILE)
    assert exchanges.overdue(views, _LIMITS, 109.0) is None
    verdict = exchanges.overdue(views, _LIMITS, 111.0)
    assert verdict is not None
    assert verdict.error == "DeadlineExceededError"
    for words in (
        "worker 0 waited 11 s at 'save' for worker 1 (in your code after shared program 3)",
        "worker 2 (compiling after shared program 3)",
        "10 s (STRATAGEM_BARRIER_TIMEOUT_S)",
    ):
        assert words in verdict.message


def test_input_that_is_read_ahead_has_time_until_somebody_waits_for_it() -> None:
    exchanges = Exchanges(_LABELS)
    exchanges.add(0, _message("batches of d", None, limit_s=None), 0.0)
    exchanges.add(1, _message("batches of d", None, limit_s=None), 0.0)
    busy = _views(Activity.PYTHON, Activity.STEP, Activity.PYTHON)
    assert exchanges.overdue(busy, _LIMITS, 1e6) is None
    waiting = _views(Activity.INPUT, Activity.STEP, Activity.INPUT)
    verdict = exchanges.overdue(waiting, _LIMITS, 1e6)
    assert verdict is not None
    assert "for worker 2" in verdict.message
    assert (
        exchanges.overdue(
            _views(Activity.INPUT, Activity.STEP, Activity.INPUT, unmoved_s=5), _LIMITS, 9
        )
        is None
    )


def _input(number: int, stream: str = "d") -> Any:
    return _message(f"batches of {stream}", 8, number=number, limit_s=None, stream=stream)


def test_waiting_process_receives_the_name_of_the_one_that_left() -> None:
    exchanges = Exchanges(_LABELS)
    exchanges.add(0, _input(4), 0.0)
    exchanges.add(1, _input(4), 0.0)
    reply = [
        ExchangeReply([0], {"kind": "abandoned", "stream": "d", "number": 4, "by": ["worker 1"]})
    ]
    assert exchanges.leave(1, "d") == reply
    assert exchanges.leave(1, "e") == [], "it is another stream"


def test_process_that_arrives_after_another_left_gets_an_immediate_reply() -> None:
    exchanges = Exchanges(_LABELS)
    exchanges.leave(0, "d")
    exchanges.leave(2, "d")
    reply = exchanges.add(1, _input(7), 0.0)
    by = ["worker 0", "worker 2"]
    assert reply == ExchangeReply([1], {"kind": "abandoned", "stream": "d", "number": 7, "by": by})


def test_closed_stream_is_never_overdue() -> None:
    exchanges = Exchanges(_LABELS)
    waiting = _views(Activity.INPUT, Activity.STEP, Activity.INPUT)
    exchanges.add(0, _input(0), 0.0)
    assert exchanges.overdue(waiting, _LIMITS, 1e6) is not None
    exchanges.leave(0, "d")
    assert exchanges.overdue(waiting, _LIMITS, 1e6) is None


def test_nothing_is_kept_of_streams_that_all_have_left() -> None:
    exchanges = Exchanges(_LABELS)
    empty = {name: len(value) for name, value in vars(exchanges).items()}
    for epoch in range(3):
        stream = f"d ({epoch})"
        exchanges.add(0, _input(0, stream), 0.0)
        exchanges.leave(1, stream)
        exchanges.add(2, _input(0, stream), 0.0)
        exchanges.leave(0, stream)
        exchanges.leave(2, stream)
    assert {name: len(value) for name, value in vars(exchanges).items()} == empty

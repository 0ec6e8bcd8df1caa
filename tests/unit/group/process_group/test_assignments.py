"""Notes of assignments outside steps: equal ones pass, and all others end every process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stratagem.group.assignments import AssignmentNotes, Assignments
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.process_group.members import joined, together

_LIMITS = GroupLimits(join_s=60, peer_s=60, stuck_s=600, barrier_s=60)

# What each of three members assigns before a call, and before the next: number, digest before, and
# digest of the new value.
_RATE, _KERNEL = (1, 10, 11), (2, 20, 21)
Assigned = Sequence[tuple[int, int | None, int]]
_EQUAL: dict[str, list[tuple[Assigned, Assigned]]] = {
    "nothing": [((), ())] * 3,
    "one": [((_RATE,), ())] * 3,
    "one after the other": [((_RATE,), (_KERNEL,))] * 3,
    "another order": [((_RATE, _KERNEL), ()), ((_KERNEL, _RATE), ()), ((_RATE, _KERNEL), ())],
    "twice by one": [(((1, 10, 7), (1, 7, 11)), ()), ((_RATE,), ()), ((_RATE,), ())],
    "there and back by one": [((), ()), ((_RATE, (1, 11, 10)), ()), ((), ())],
    "the value that it has": [(((1, 10, 10),), ()), ((), ()), ((), ())],
    "very many": [([(n, 0, n + 5) for n in range(100)], ())] * 3,
}
_many = [(n, 0, n + 5) for n in range(100)]
_DIFFERENT: dict[str, tuple[list[tuple[Assigned, Assigned]], str]] = {
    "by process 0 alone": (
        [((_RATE,), ()), ((), ()), ((), ())],
        "worker 0 .* assigned 'v1' outside a step, at train.py:0. worker . .* did not assign",
    ),
    "by the last alone": (
        [((), ()), ((), ()), ((_RATE,), ())],
        "worker 2 .* assigned 'v1' .* at train.py:2. worker . .* did not assign it",
    ),
    "by all but one": (
        [((_RATE,), ()), ((), ()), ((_RATE,), ())],
        "worker 0 .* assigned 'v1' .* worker . .* did not assign it",
    ),
    "unknown before": (
        [((), ()), (((1, None, 11),), ()), ((), ())],
        "worker 1 .* assigned 'v1' .* worker . .* did not assign it",
    ),
    "another value": (
        [((_RATE,), ()), ((_RATE,), ()), (((1, 10, 12),), ())],
        "worker 0 .* assigned 'v1' .* worker 2 .* another value.* at train.py:2",
    ),
    "another value of one of two": (
        [((_RATE, _KERNEL), ()), ((_RATE, (2, 20, 22)), ()), ((_RATE, _KERNEL), ())],
        "worker 0 .* assigned 'v2' .* worker 1 .* another value.* at train.py:1",
    ),
    "one more": (
        [((_RATE,), ()), ((_RATE, _KERNEL), ()), ((_RATE,), ())],
        "worker 1 .* assigned 'v2' .* at train.py:1. worker . .* did not assign it",
    ),
    "one of very many": (
        [(_many, ()), ([*_many[:-1], (99, 0, 1)], ()), (_many, ())],
        "worker 0 .* assigned 'v0' .* worker 1 .* another value",
    ),
    "a call later": (
        [((), (_RATE,)), ((_RATE,), ()), ((), (_RATE,))],
        "worker 1 .* assigned 'v1' .* at train.py:1. worker . .* did not assign it",
    ),
    "in the second interval": (
        [((_RATE,), ()), ((_RATE,), (_KERNEL,)), ((_RATE,), ())],
        "worker 1 .* assigned 'v2' .* at train.py:1. worker . .* did not assign it",
    ),
}
_CALLS: dict[str, Callable[[Group], Any]] = {
    "program": lambda member: member.begin_step(),
    "exchange": lambda member: member.exchange("place", None),
}


def _note(member: Group, assigned: Assigned) -> None:
    for number, before, digest in assigned:
        place = f"train.py:{member.process_id}"
        member.assignments.add(number, f"v{number}", before=before, digest=digest, place=place)


def _act(member: Group, assigned: tuple[Assigned, Assigned], call: str) -> None:
    for part in assigned:
        _note(member, part)
        _CALLS[call](member)
    _CALLS[call](member)


@pytest.fixture(scope="module")
def members():
    groups = joined(3, _LIMITS)
    yield groups
    assert together(3, lambda index: groups[index].leave()) == [True] * 3
    for group in groups:
        group.abandon()


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("every", _EQUAL.values(), ids=_EQUAL)
def test_equal_assignments_pass(members, every, call) -> None:
    def act(index: int) -> list[Any]:
        _act(members[index], every[index], call)
        return members[index].exchange("end", None)

    assert together(3, act) == [[None] * 3] * 3


@pytest.mark.parametrize("call", [*_CALLS, "none"])
@pytest.mark.parametrize(("every", "words"), _DIFFERENT.values(), ids=_DIFFERENT)
def test_other_assignments_end_all(every, words, call) -> None:
    """In the next exchange, in the program after the next one, or at the end of the processes."""
    members = joined(3, _LIMITS)

    def act(index: int) -> bool:
        if call in _CALLS:
            _act(members[index], every[index], call)
        else:
            _note(members[index], [*every[index][0], *every[index][1]])
        return members[index].leave()

    try:
        ends = together(3, act)
        if call == "none" and words == _DIFFERENT["a call later"][1]:
            assert ends == [True] * 3  # nothing was between
            return
        assert all(end is False or type(end) is RuntimeError for end in ends), ends
        if call == "exchange":
            assert False not in ends
        for member in members:
            assert member.verdict is not None
            assert member.verdict.error == "RuntimeError"
            assert re.match(words, member.verdict.message), member.verdict.message
            assert "broadcast_object" in member.verdict.message
    finally:
        for member in members:
            member.abandon()


def test_notes_of_a_program_that_did_not_start_belong_to_the_next_try() -> None:
    """One process fails to start a program, and tries again; the others wait in it."""
    members = joined(2, _LIMITS)
    try:

        def act(index: int) -> Any:
            member = members[index]
            member.begin_step()
            if index == 1:
                member.return_to_step(0)
                member.begin_step()
            for digest in range(3):
                member.assignments.add(1, "v", before=9, digest=digest, place="a")
                member.begin_step()
            return member.exchange("end", None)

        assert together(2, act) == [[None] * 2] * 2
    finally:
        for member in members:
            member.abandon()


def test_memory_of_notes_does_not_grow_with_steps() -> None:
    assignments, both = Assignments(["a", "b"]), [AssignmentNotes(), AssignmentNotes()]
    for step in range(130):
        for process_id, notes in enumerate(both):
            notes.add(1, "rate", before=step, digest=step + 1, place="train.py:1")
            message = notes.take(step)
            is_sent = step in (0, 64, 128)
            assert (message is not None) == is_sent
            if message is not None:
                assert assignments.add(process_id, message) == (process_id, None)
            assert assignments.move(process_id, step + 1) is None
    assert assignments.settle() is None
    assert not any(assignments._sent)
    for process_id, notes in enumerate(both):  # the rest, before an exchange
        message = notes.take(130, is_last=True)
        assert message is not None
        assert not notes
        assert assignments.add(process_id, message) == (process_id, None)
    assert assignments.settle() is None


@pytest.mark.parametrize("lacks", [False, True], ids=["another value", "none"])
def test_one_of_assignments_in_every_step_is_found_while_steps_go_on(lacks: bool) -> None:
    """They go together; a process that waits for the answer stops all."""
    members = joined(2, _LIMITS)

    def act(index: int) -> None:
        member = members[index]
        for step in range(10_000):
            if not (lacks and index == 1 and step == 10):
                digest = -1 if index == 1 and step == 10 else step + 1
                member.assignments.add(1, "v1", before=step, digest=digest, place="train.py:1")
            member.begin_step()

    try:
        for error in together(2, act):
            assert type(error) is RuntimeError
            assert "assigned 'v1' outside a step, at train.py:1" in str(error)
            assert 64 < members[0].num_steps <= 3 * 64
    finally:
        for member in members:
            member.abandon()

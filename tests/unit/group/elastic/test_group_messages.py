"""Messages about changes of the members, and errors."""

from __future__ import annotations

import pytest

from stratagem.errors import DeadlineExceededError
from stratagem.group.elastic import views as group_messages
from stratagem.group.elastic.views import View

_LABELS = ("chief", "worker 0", "worker 1", "worker 2")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({0: 10, 1: 11, 2: 12}, {0: 10, 2: 12}, "Lost worker 0: 2 of 4 continue"),
        ({0: 10, 1: 11, 2: 12}, {2: 12}, "Lost chief, worker 0: 1 of 4 continue"),
        ({0: 10}, {0: 10, 1: 11, 3: 13}, "worker 0, worker 2 joined: 3 of 4 continue"),
        ({0: 10, 1: 11}, {0: 10, 2: 12}, "Lost worker 0; worker 1 joined: 2 of 4 continue"),
        # Another process with the id of the one before.
        ({0: 10, 1: 11}, {0: 10, 1: 99}, "Lost worker 0; worker 0 joined: 2 of 4 continue"),
        ({0: 10, 1: 11}, {0: 10, 1: 11}, "Lost a connection, and no member: 2 of 4 continue"),
    ],
    ids=str,
)
def test_a_change_names_those_that_were_lost_and_that_joined(before, after, text) -> None:
    views = [
        View(number, tuple(members), 0, tuple(members.values()))
        for number, members in enumerate((before, after))
    ]
    assert group_messages.change_text(*views, _LABELS, most=4) == text


def _raise(error: Exception) -> None:
    raise error


def test_a_step_before_joining_has_an_error_that_says_how_to_join() -> None:
    with pytest.raises(RuntimeError, match="'save' was called in a process that has not joined"):
        _raise(group_messages.not_joined("save"))


def test_an_agreement_on_a_step_has_an_error_with_another_way() -> None:
    with pytest.raises(NotImplementedError, match="'exit 1' was to be agreed on by the processes"):
        _raise(group_messages.agreement_refused("exit 1"))


def test_a_wait_that_was_too_long_names_the_others_and_the_setting() -> None:
    error = group_messages.waited_too_long("chief", ["worker 0", "worker 1"], 31.4, 30.0, "SOME_S")
    with pytest.raises(
        DeadlineExceededError,
        match="chief waited 31 s for values of other members; all of worker 0, worker 1 still run",
    ):
        _raise(error)
    assert "progress within 30 s (SOME_S)" in str(error)


def test_a_step_that_differs_has_an_error_with_both_sides() -> None:
    cause = ConnectionError("worker 1 called 'step b1'")
    with pytest.raises(RuntimeError, match="chief called 'step a0', but worker 1 called 'step b1'"):
        _raise(group_messages.diverged("chief", "'step a0'", cause))

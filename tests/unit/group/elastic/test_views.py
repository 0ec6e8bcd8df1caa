"""Views of an elastic group, and the decision that ends one and begins the next."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from stratagem.errors import UnavailableError
from stratagem.group.elastic.views import Report, View, change_text, next_view, with_newcomers


def test_a_member_without_the_values_of_a_committed_round_is_refused() -> None:
    with pytest.raises(RuntimeError, match="exclude each other"):
        next_view([Report(0, 0, 8, is_complete=False), Report(1, 0, 7, is_complete=False)])


def test_members_of_two_views_continue_after_the_later_one() -> None:
    reports = [Report(0, 4, 7, is_complete=False), Report(1, 5, 7, is_complete=False)]
    assert next_view(reports).number == 6


def test_all_states_that_a_loss_can_leave_have_a_decision_that_each_member_can_follow() -> None:
    """Members are before, in, or past the barrier; past it only if all have reached it."""
    for stages in itertools.product(("before", "in", "past"), repeat=3):
        if "past" in stages and "before" in stages:
            continue
        reports = [
            Report(member, 0, 5 + (stage == "past"), is_complete=stage == "in")
            for member, stage in enumerate(stages)
        ]
        decided = next_view(reports).num_rounds
        for report in reports:
            assert decided == report.num_rounds or (
                decided == report.num_rounds + 1 and report.is_complete
            )
        assert decided == (5 if "before" in stages else 6)


def test_one_without_the_state_stays_new_until_its_first_round_counts() -> None:
    reports = [Report(0, 3, 7, is_complete=True), Report(1, 3, 7, is_complete=True, is_new=True)]
    assert next_view(reports).newcomers == ()
    reports[0] = Report(0, 3, 7, is_complete=False)
    assert next_view(reports).newcomers == (1,)


def test_no_view_has_only_members_without_the_state() -> None:
    with pytest.raises(UnavailableError, match="All members that had the values"):
        next_view([Report(1, 3, 7, is_complete=True, is_new=True)])


def test_incarnations_and_newcomers_are_in_the_order_of_members() -> None:
    view = next_view([Report(3, 0, 2, False, 33), Report(1, 0, 2, False, 11)])
    assert with_newcomers(view, {2: 22}) == View(1, (1, 2, 3), 2, (11, 22, 33), (2,))


def test_a_view_arrives_as_it_was_sent() -> None:
    view = View(4, (0, 2), 9, (11, 22), (2,), is_change_due=True)
    assert View.of_message(json.loads(json.dumps(dataclasses.asdict(view)))) == view


# The text about a change of the members.

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
    assert change_text(*views, _LABELS) == text

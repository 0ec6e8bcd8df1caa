"""The decision that ends one view and begins the next."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from stratagem.errors import UnavailableError
from stratagem.group.elastic.views import Report, View, next_view, with_newcomers


def test_a_round_that_not_all_completed_does_not_count() -> None:
    reports = [Report(0, 0, 7, is_complete=True), Report(2, 0, 7, is_complete=False)]
    assert next_view(reports) == View(1, (0, 2), 7, (0, 0))


def test_a_round_that_all_completed_counts() -> None:
    reports = [Report(2, 3, 7, is_complete=True), Report(1, 3, 7, is_complete=True)]
    assert next_view(reports) == View(4, (1, 2), 8, (0, 0))


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_round_that_one_has_committed_counts_for_all(is_complete) -> None:
    reports = [Report(0, 0, 8, is_complete=is_complete), Report(1, 0, 7, is_complete=True)]
    assert next_view(reports).num_rounds == 8


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


def _report(member: int, num_rounds: int, *participants: int, is_complete: bool = False) -> Report:
    return Report(member, 0, num_rounds, is_complete, participants=participants, num_backups=1)


def _view(members: tuple[int, ...], num_rounds: int, *behind: tuple[int, int]) -> View:
    """Returns the view after the first one, of processes of incarnation 0."""
    return View(1, members, num_rounds, (0,) * len(members), behind=behind)


def test_a_view_arrives_as_it_was_sent() -> None:
    view = View(4, (0, 2), 9, (11, 22), (2,), is_change_due=True, behind=((2, 7),))
    assert View.of_message(json.loads(json.dumps(dataclasses.asdict(view)))) == view


def test_a_round_counts_if_its_participants_have_it_and_another_member_gets_it() -> None:
    reports = [_report(0, 7, 0, 1, is_complete=True), _report(1, 7, 0, 1, is_complete=True)]
    assert next_view([*reports, _report(2, 7)]) == _view((0, 1, 2), 8, (2, 7))
    assert next_view([*reports, _report(2, 4)]) == _view((0, 1, 2), 8, (2, 4))


def test_a_round_that_a_participant_lacks_counts_for_none() -> None:
    reports = [_report(0, 7, 0, 1, is_complete=True), _report(1, 7, 0, 1), _report(2, 5)]
    assert next_view(reports) == _view((0, 1, 2), 7, (2, 5))


def test_a_round_that_a_lost_participant_has_sent_on_counts() -> None:
    """It has left the barrier, so the other participants are in it."""
    reports = [_report(1, 7, 0, 1, is_complete=True), _report(2, 8), _report(3, 6)]
    assert next_view(reports) == _view((1, 2, 3), 8, (3, 6))


def test_one_that_is_left_alone_goes_on_from_what_it_has() -> None:
    assert next_view([_report(2, 5)]) == _view((2,), 5)


def test_members_with_other_numbers_of_backups_are_refused() -> None:
    with pytest.raises(RuntimeError, match="exclude each other"):
        next_view([_report(0, 0), Report(1, 0, 0, is_complete=False)])

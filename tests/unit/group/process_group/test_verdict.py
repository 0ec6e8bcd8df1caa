"""Verdicts and their messages for a table of member states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.verdict import Activity, GroupLimits, MemberView, ProgramPosition, judge, named

_LIMITS = GroupLimits(join_s=300, peer_s=30, stuck_s=120, barrier_s=300)


def _member(
    index: int,
    kind: Activity = Activity.PYTHON,
    name: str = "train",
    step: int = 7,
    **facts: object,
) -> MemberView:
    return MemberView(f"worker {index} (h{index}:1)", ProgramPosition(kind, name, step), **facts)


_IN_STEP_8 = _member(0, Activity.STEP, step=8, unmoved_s=200)


@pytest.mark.parametrize(
    "others",
    [
        [_member(1)],
        [_member(1, silent_s=29)],
        [_member(1, Activity.STEP, step=8, unmoved_s=1000)],  # one long step of all
        [_member(1, Activity.COMPILE, unmoved_s=1000)],
        [_member(1, unmoved_s=119)],
        [_member(1, Activity.EXCHANGE, "save", step=7, unmoved_s=1)],  # may be old news
        [_member(1, Activity.EXCHANGE, "save", step=7, unmoved_s=9, silent_s=5)],  # surely is
        [_member(1, unmoved_s=200, silent_s=5)],
        [_member(1, Activity.EXCHANGE, "save", step=9, unmoved_s=10)],
        [_member(1, Activity.AGREEMENT, "the step to save", step=7, unmoved_s=1000)],
        [_member(1, Activity.STEP, "train", step=9, unmoved_s=10)],
        [_member(1, Activity.EXIT, step=8, has_left=True, unmoved_s=10, is_connected=False)],
    ],
)
def test_members_that_can_go_on_are_left_alone(others) -> None:
    assert judge([_IN_STEP_8, *others], _LIMITS) is None


def test_processes_waiting_at_exit_are_not_stuck() -> None:
    ended = _member(0, Activity.EXIT, has_left=True, unmoved_s=1000)
    assert judge([ended, _member(1, unmoved_s=1000)], _LIMITS) is None


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            _member(1, is_connected=False),
            UnavailableError,
            [
                "worker 1 (h1:1) died in your code after shared program 7",
                "in shared program 8 (train)",
            ],
        ),
        (
            _member(1, silent_s=31),
            UnavailableError,
            ["worker 1 (h1:1) has not answered for 31 s", "STRATAGEM_PEER_TIMEOUT_S", "30 s"],
        ),
        (
            _member(1, error_text="ValueError: a bug"),
            UnavailableError,
            ["worker 1 (h1:1) ended with an error", "ValueError: a bug"],
        ),
        (
            _member(1, unmoved_s=121),
            DeadlineExceededError,
            ["worker 1 (h1:1) has made no progress for 121 s", "STRATAGEM_STUCK_TIMEOUT_S"],
        ),
        (
            _member(1, Activity.EXIT, unmoved_s=5, has_left=True),
            UnavailableError,
            ["worker 1 (h1:1) left early", "at its end after shared program 7", "worker 0 (h0:1)"],
        ),
        (
            _member(1, Activity.EXCHANGE, "model.save", unmoved_s=5),
            RuntimeError,
            [
                "worker 1 (h1:1) is out of step",
                "at 'model.save' after shared program 7",
                "program 8 (train)",
            ],
        ),
        (
            _member(1, Activity.STEP, "evaluate", step=8, unmoved_s=5),
            RuntimeError,
            [
                "worker 1 (h1:1) is out of step",
                "in shared program 8 (evaluate)",
                "in shared program 8 (train)",
            ],
        ),
    ],
    ids=["died", "silent", "error", "stuck", "left", "elsewhere", "other program"],
)
def test_the_member_is_named_and_where_the_others_are(other, error, words) -> None:
    verdict = judge([_IN_STEP_8, other], _LIMITS)
    assert verdict is not None
    raised = verdict.exception()
    assert type(raised) is error
    for word in words:
        assert word in str(raised)


def test_other_silent_processes_are_named() -> None:
    verdict = judge([_member(0), _member(1, silent_s=31), _member(2, silent_s=29)], _LIMITS)
    assert verdict is not None
    assert "worker 1 (h1:1) has not answered for 31 s; it was last in your code" in verdict.message
    assert "worker 0 (h0:1) is in your code after shared program 7." in verdict.message
    also_silent = "worker 2 (h2:1) was in your code after shared program 7, and has not answered"
    assert f"{also_silent} for 29 s either." in verdict.message


def test_one_that_waits_for_batches_is_not_left_alone_by_one_that_ended() -> None:
    waiting = _member(0, Activity.INPUT, "dataset 0", unmoved_s=5)
    verdict = judge([waiting, _member(1, Activity.EXIT, unmoved_s=5, has_left=True)], _LIMITS)
    assert verdict is not None
    assert "left early" in verdict.message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Activity.PYTHON, "in your code after shared program 7"),
        (Activity.COMPILE, "compiling after shared program 7"),
        (Activity.STEP, "in shared program 7 (train)"),
        (Activity.EXCHANGE, "at 'train' after shared program 7"),
        (Activity.AGREEMENT, "agreeing on train after shared program 7"),
        (Activity.INPUT, "waiting for a batch of train after shared program 7"),
        (Activity.EXIT, "at its end after shared program 7"),
    ],
)
def test_positions_are_described_in_words(kind, text) -> None:
    assert str(ProgramPosition(kind, "train", 7)) == text


_KINDS = [Activity.STEP, Activity.EXCHANGE, Activity.INPUT, Activity.EXIT, Activity.PYTHON]
_MEMBERS = st.lists(
    st.builds(
        _member,
        st.just(0),
        st.sampled_from(_KINDS),
        st.sampled_from(["train", "evaluate"]),
        st.integers(1, 3),
        unmoved_s=st.sampled_from([1.0, 5.0]),
    ),
    max_size=6,
)


@given(_MEMBERS)
def test_mismatch_is_found_if_any_two_members_have_one(members) -> None:
    positions = [member.position for member in members if member.unmoved_s > 3]
    settled = [(one.kind, one.step, one.name) for one in positions]
    is_wrong = any(
        (kind is Activity.STEP and other in (Activity.EXCHANGE, Activity.EXIT) and behind < step)
        or (kind is other is Activity.STEP and behind == step and called != name)
        or (kind in (Activity.EXCHANGE, Activity.INPUT) and other is Activity.EXIT)
        for kind, step, name in settled
        for other, behind, called in settled
    )
    verdict = judge(members, _LIMITS)
    assert (verdict is not None) is is_wrong


def test_messages_name_some_of_very_many() -> None:
    assert named(["worker 0", "worker 1"]) == "worker 0, worker 1"
    many = [_member(index) for index in range(10_000)]
    many[5000] = _member(5000, silent_s=31)
    many[7000] = _member(7000, is_connected=False)
    verdict = judge(many, _LIMITS)
    assert verdict is not None
    assert verdict.lost == "worker 5000 (h5000:1)"
    assert "worker 7000" not in verdict.message  # connected or not, it is one of many
    assert "and 9935 more" in verdict.message
    assert len(verdict.message) < 10_000


def test_silent_ones_are_named_first_among_very_many() -> None:
    many = [_member(0, silent_s=31), *map(_member, range(1, 1000)), _member(1000, silent_s=29)]
    verdict = judge(many, _LIMITS)
    assert verdict is not None
    assert "worker 1000 (h1000:1) was in your code" in verdict.message

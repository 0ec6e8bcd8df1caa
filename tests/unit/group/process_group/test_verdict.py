"""Verdicts and their messages for a table of member states."""

from __future__ import annotations

import concurrent.futures
import json
import re
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem import logs
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group import current
from stratagem.group.current import Identity, current_group, set_current_group
from stratagem.group.hub import ExchangeReply, Exchanges, Link, reachable_addresses
from stratagem.group.member import Group
from stratagem.group.verdict import Activity, GroupLimits, MemberView, ProgramPosition, judge, named
from tests.unit.group.process_group.members import connected, free_port, hello, identity

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
    waiting_at_exit = _member(0, Activity.EXIT, has_left=True, unmoved_s=1000)
    assert judge([waiting_at_exit, _member(1, unmoved_s=1000)], _LIMITS) is None


_TRAINS = r"in shared program 8 \(train\)"


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            _member(1, is_connected=False),
            UnavailableError,
            rf"died in your code after shared program 7(?s:.)*{_TRAINS}",
        ),
        (
            _member(1, silent_s=31),
            UnavailableError,
            r"has not answered for 31 s(?s:.)*30 s(?s:.)*STRATAGEM_PEER_TIMEOUT_S",
        ),
        (
            _member(1, error_text="ValueError: a bug"),
            UnavailableError,
            r"ended with an error(?s:.)*ValueError: a bug",
        ),
        (
            _member(1, unmoved_s=121),
            DeadlineExceededError,
            r"has made no progress for 121 s(?s:.)*STRATAGEM_STUCK_TIMEOUT_S",
        ),
        (
            _member(1, Activity.EXIT, unmoved_s=5, has_left=True),
            UnavailableError,
            r"left early: .*at its end after shared program 7(?s:.)*worker 0 \(h0:1\)",
        ),
        (
            _member(1, Activity.EXCHANGE, "model.save", unmoved_s=5),
            RuntimeError,
            rf"is out of step: .*at 'model.save' after shared program 7(?s:.)*{_TRAINS}",
        ),
        (
            _member(1, Activity.STEP, "evaluate", step=8, unmoved_s=5),
            RuntimeError,
            rf"is out of step: .*in shared program 8 \(evaluate\)(?s:.)*{_TRAINS}",
        ),
    ],
    ids=["died", "silent", "error", "stuck", "left", "elsewhere", "other program"],
)
def test_the_member_is_named_and_where_the_others_are(other, error, words) -> None:
    verdict = judge([_IN_STEP_8, other], _LIMITS)
    raised = verdict.exception()
    assert type(raised) is error
    assert re.search(rf"worker 1 \(h1:1\) {words}", str(raised)), str(raised)


def test_other_silent_processes_are_named() -> None:
    verdict = judge([_member(0), _member(1, silent_s=31), _member(2, silent_s=29)], _LIMITS)
    assert "worker 1 (h1:1) has not answered for 31 s; it was last in your code" in verdict.message
    assert "worker 0 (h0:1) is in your code after shared program 7." in verdict.message
    also_silent = "worker 2 (h2:1) was in your code after shared program 7, and has not answered"
    assert f"{also_silent} for 29 s either." in verdict.message


def test_one_that_waits_for_batches_is_not_left_alone_by_one_that_ended() -> None:
    waiting = _member(0, Activity.INPUT, "dataset 0", unmoved_s=5)
    verdict = judge([waiting, _member(1, Activity.EXIT, unmoved_s=5, has_left=True)], _LIMITS)
    assert "left early" in verdict.message


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
    assert verdict.lost == "worker 5000 (h5000:1)"
    assert "worker 7000" not in verdict.message  # connected or not, it is one of many
    assert "and 9935 more" in verdict.message
    assert len(verdict.message) < 10_000


def test_silent_ones_are_named_first_among_very_many() -> None:
    many = [_member(0, silent_s=31), *map(_member, range(1, 1000)), _member(1000, silent_s=29)]
    verdict = judge(many, _LIMITS)
    assert "worker 1000 (h1000:1) was in your code" in verdict.message


# Exchanges on process 0: complete, out of order, overdue.

_LABELS = ["worker 0", "worker 1", "worker 2"]
_LIMITS_OF_EXCHANGES = GroupLimits(stuck_s=120)


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


def test_input_that_is_read_ahead_has_time_until_somebody_waits_for_it() -> None:
    exchanges = Exchanges(_LABELS)
    for process_id in range(2):
        exchanges.add(process_id, _message("batches of d", None, limit_s=None), 0.0)

    def overdue(kind: Activity, now_s: float, **views: float) -> Any:
        found = _views(kind, Activity.STEP, kind, **views)
        return exchanges.overdue(found, _LIMITS_OF_EXCHANGES, now_s)

    assert overdue(Activity.PYTHON, 1e6) is None
    assert "for worker 2" in overdue(Activity.INPUT, 1e6).message
    assert overdue(Activity.INPUT, 9, unmoved_s=5) is None


def _input(number: int, stream: str = "d") -> Any:
    return _message(f"batches of {stream}", 8, number=number, limit_s=None, stream=stream)


def test_closed_stream_is_never_overdue() -> None:
    exchanges = Exchanges(_LABELS)
    waiting = _views(Activity.INPUT, Activity.STEP, Activity.INPUT)
    exchanges.add(0, _input(0), 0.0)
    assert exchanges.overdue(waiting, _LIMITS_OF_EXCHANGES, 1e6) is not None
    exchanges.leave(0, "d")
    assert exchanges.overdue(waiting, _LIMITS_OF_EXCHANGES, 1e6) is None


# Reachable addresses of the processes of a group.

_ITSELF = Link("127.0.0.1", "127.0.0.1", "127.0.0.1")
_AS_DEBIAN = Link("127.0.0.1", "127.0.0.1", "127.0.1.1")
_THERE = Link("10.0.0.7", "10.0.0.7", "10.0.0.1")


@pytest.mark.parametrize(
    ("links", "wanted"),
    [
        ([_ITSELF, _ITSELF], ["127.0.0.1", "127.0.0.1"]),
        ([_ITSELF, _AS_DEBIAN], ["127.0.0.1", "127.0.0.1"]),
        ([_ITSELF, _THERE], ["10.0.0.1", "10.0.0.7"]),
        ([_ITSELF, _THERE, _AS_DEBIAN], ["10.0.0.1", "10.0.0.7", "10.0.0.1"]),
        ([_ITSELF, _AS_DEBIAN, _THERE], ["10.0.0.1", "10.0.0.1", "10.0.0.7"]),
        # On the host of process 0, by its address in the network.
        ([_ITSELF, Link(*["10.0.0.1"] * 3), _THERE], ["10.0.0.1", "10.0.0.1", "10.0.0.7"]),
        # By a tunnel of its own: it is not on the host of process 0.
        ([_ITSELF, Link("127.0.0.1", "10.0.0.9", "10.0.0.1")], ["10.0.0.1", "127.0.0.1"]),
        # Two networks: the first that is heard of.
        ([_ITSELF, _THERE, Link("172.16.0.2", "172.16.0.2", "172.16.0.1")],
         ["10.0.0.1", "10.0.0.7", "172.16.0.2"]),
        ([Link("::1", "::1", "::1"), Link("fd00::7", "fd00::7", "fd00::1")],
         ["fd00::1", "fd00::7"]),
        ([_ITSELF, Link("fe80::7%eth0", "fe80::7%eth0", "fe80::1%eth0")],
         ["fe80::1%eth0", "fe80::7%eth0"]),
        ([_ITSELF, Link("no address", "10.0.0.7", "10.0.0.1")], ["10.0.0.1", "no address"]),
    ],
)  # fmt: skip
def test_process_on_the_host_of_process_0_gets_a_reachable_address(links, wanted) -> None:
    assert reachable_addresses(links) == wanted


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_process_0_keeps_its_address_without_other_hosts(address) -> None:
    port, limits = free_port(), GroupLimits(join_s=120)

    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        joining = [executor.submit(Group, identity(i, 3, port), limits) for i in range(2)]
        with connected(port, hello(2, 3, address=address), claim="member 2"):
            members = [future.result() for future in joining]
            for member in members:
                member.abandon()
    assert [member.own_address for member in members] == ["127.0.0.1"] * 2


# The group of this process, and the name that its log records get.


def test_group_is_set_once_and_names_this_process_in_logs(monkeypatch) -> None:
    monkeypatch.setattr(current, "_groups", [])
    monkeypatch.setattr(logs._LogState, "task", None)
    assert current_group() is None
    identity = Identity(process_id=1, labels=("worker 0", "worker 1"), host="a", port=1)
    group = types.SimpleNamespace(identity=identity)
    set_current_group(group)
    assert current_group() is group
    assert logs._LogState.task == ("worker 1", 1)
    with pytest.raises(AssertionError):
        set_current_group(group)

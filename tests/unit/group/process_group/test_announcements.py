"""Announcements: receivers, order, and announcements before a listener exists."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.process_group.members import joined, together

_LIMIT_S = 120.0
_LIMITS = GroupLimits(join_s=_LIMIT_S, peer_s=_LIMIT_S, stuck_s=600, barrier_s=_LIMIT_S)


@pytest.fixture
def members() -> Iterator[list[Group]]:
    groups = joined(3, _LIMITS)
    yield groups
    for group in groups:
        group.abandon()


def heard_by(member: Group, topic: str) -> queue.Queue[tuple[int, list[int]]]:
    """Announcements that a member receives from now on."""
    heard: queue.Queue[tuple[int, list[int]]] = queue.Queue()
    member.listen(topic, lambda process_id, numbers: heard.put((process_id, numbers)))
    return heard


def test_all_hear_all_in_one_order(members) -> None:
    heard = [heard_by(member, "topic") for member in members]
    together(3, lambda i: [members[i].announce("topic", [i, n]) for n in range(10)])
    (first, *others) = [[one.get(timeout=_LIMIT_S) for _ in range(30)] for one in heard]
    assert sorted(first) == [(i, [i, n]) for i in range(3) for n in range(10)]
    assert [other == first for other in others] == [True, True]


def test_earlier_announcements_reach_a_later_listener(members) -> None:
    early = heard_by(members[0], "topic")
    members[2].announce("topic", (7,))
    members[2].announce("another", [])
    assert early.get(timeout=_LIMIT_S) == (2, [7])
    together(3, lambda i: members[i].exchange("all have heard it", None))
    late, another = heard_by(members[1], "topic"), heard_by(members[1], "another")
    assert (late.get_nowait(), another.get_nowait()) == ((2, [7]), (2, []))
    assert late.empty()
    assert another.empty()


def test_announcements_reach_processes_that_are_alive(members) -> None:
    heard = [heard_by(members[index], "topic") for index in (0, 2)]
    members[1].abandon()
    for index in (0, 2):
        members[index].wait_for_verdict()
    members[2].announce("topic", [1])
    assert [one.get(timeout=_LIMIT_S) for one in heard] == [(2, [1])] * 2


def test_announcing_does_not_block_without_a_connection(members) -> None:
    members[0].abandon()
    members[1].wait_for_verdict()
    heard = heard_by(members[1], "topic")
    members[1].announce("topic", [1])
    members[1].abandon()
    members[1].announce("topic", [2])
    assert heard.empty()

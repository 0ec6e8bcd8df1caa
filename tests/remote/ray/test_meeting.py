"""What workers with programs of their own learn from each other."""

from __future__ import annotations

from stratagem.remote.ray.meeting import Meeting


def test_who_enters_learns_where_the_servers_are_now() -> None:
    meeting = Meeting(b"keys", ["tcp://a:1", "tcp://a:2"])
    assert meeting.enter(0, "node") == (b"keys", ["tcp://a:1", "tcp://a:2"])
    assert meeting.address_of(1) == "tcp://a:2"
    meeting.move(1, "tcp://b:2")
    assert meeting.address_of(1) == "tcp://b:2"
    assert meeting.enter(1, "other") == (b"keys", ["tcp://a:1", "tcp://b:2"])


def test_who_leaves_is_not_waited_for() -> None:
    meeting = Meeting(b"", [])
    for worker in (0, 1):
        meeting.enter(worker, f"node {worker}")
    meeting.leave(0)
    meeting.leave(0)
    assert meeting.present() == {1: "node 1"}

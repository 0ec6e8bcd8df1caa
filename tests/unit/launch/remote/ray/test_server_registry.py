"""Registry that workers share."""

from __future__ import annotations

from stratagem.launch.remote.ray.server_registry import ServerRegistry


def test_who_enters_learns_where_the_servers_are_now() -> None:
    registry = ServerRegistry(b"keys", ["tcp://a:1", "tcp://a:2"])
    assert registry.enter(0, "node") == (b"keys", ["tcp://a:1", "tcp://a:2"])
    assert registry.address_of(1) == "tcp://a:2"
    registry.move(1, "tcp://b:2")
    assert registry.address_of(1) == "tcp://b:2"
    assert registry.enter(1, "other") == (b"keys", ["tcp://a:1", "tcp://b:2"])


def test_who_leaves_is_not_waited_for() -> None:
    registry = ServerRegistry(b"", [])
    for worker in (0, 1):
        registry.enter(worker, f"node {worker}")
    registry.leave(0)
    registry.leave(0)
    assert registry.present() == {1: "node 1"}

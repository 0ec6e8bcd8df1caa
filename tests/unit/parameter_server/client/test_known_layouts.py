"""Layouts that a client knows, and requests that keep them as they are."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from stratagem.parameter_server.client.shard_layout import (
    KeyLayout,
    KnownLayouts,
    ShardLayout,
    by_layouts,
    layout_of_keys,
)

TABLE = layout_of_keys("t", (2,), "float32", range(2), {"max_rows": 7})
MOVED = dataclasses.replace(
    layout_of_keys("t", (2,), "float32", range(3), {"max_rows": 7}), generation=1
)


def test_a_newer_layout_replaces_an_older_one() -> None:
    known = KnownLayouts()
    assert not known.add(TABLE)
    assert known.moved == []
    assert known.add(MOVED)
    assert known["t"] == MOVED
    assert not known.add(TABLE)  # from before the move
    assert not known.add(MOVED)
    assert (known.all, known.moved, known.num_moves) == ([MOVED], [MOVED], 1)


def test_slots_are_found_by_their_variable() -> None:
    known = KnownLayouts()
    dense = ShardLayout("a:b", (3,), "float32", (0,), (3,))
    known.add(dense)
    known.add(TABLE)
    assert known.find("a:b") == (dense, "")
    assert known.find("t:adam.m") == (TABLE, ":adam.m")
    with pytest.raises(KeyError):
        known.find("u:adam.m")


def test_layouts_change_between_requests() -> None:
    class Client:
        known = KnownLayouts()

        @by_layouts
        def ask(self, begun: threading.Event, may_end: threading.Event) -> str:
            begun.set()
            assert may_end.wait(60)
            ended.append("request")
            return "answer"

    client, ended = Client(), list[str]()
    begun, may_end, is_waiting = (threading.Event() for _ in range(3))
    asking = threading.Thread(target=client.ask, args=(begun, may_end))
    asking.start()
    assert begun.wait(60)

    def change() -> None:
        is_waiting.set()
        with client.known.changing():
            ended.append("change")

    changing = threading.Thread(target=change)
    changing.start()
    assert is_waiting.wait(60)
    while not client.known._is_changing:
        threading.Event().wait(0.001)
    later = threading.Thread(target=client.ask, args=(threading.Event(), may_end))
    later.start()
    may_end.set()
    for thread in (asking, changing, later):
        thread.join(60)
    assert ended == ["request", "change", "request"]


def test_a_layout_survives_json() -> None:
    fields = dataclasses.asdict(MOVED)
    fields |= {name: list(fields[name]) for name in ("shape", "servers", "rows")}
    assert KeyLayout.from_fields(fields) == MOVED
    assert [MOVED.name_of(part) for part in range(3)] == ["t/part_0@1", "t/part_1@1", "t/part_2@1"]

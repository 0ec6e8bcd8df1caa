"""Requests of a move of keyed tables, as one server handles them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from stratagem.errors import UnavailableError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.shard_layout import layout_of_keys
from stratagem.parameter_server.server.shards import ShardSpec
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.table_moves import TableMoves
from tests.unit.parameter_server.server.update_rules import Momentum

SPEC = ShardSpec.from_fields(layout_of_keys("t", (2,), "float32", [0]).spec_of(0))
NEW = dataclasses.replace(SPEC, name="t/part_0@1")


@pytest.fixture
def store() -> ServerVariables:
    store = ServerVariables()
    store.create(SPEC)
    store.set_rule(Momentum(), ["t"])
    store.update({}, {"t": (np.arange(5), np.ones((5, 2), np.float32))})
    return store


def begin(moves: TableMoves, move: str = "m") -> None:
    tables = {"t": {"spec": None}, NEW.name: {"spec": dataclasses.asdict(NEW)}}
    moves.begin(Message("begin_move", {"move": move, "tables": tables}))


def copy(moves: TableMoves, number: int = 0, first: int = 0, move: str = "m") -> Message:
    fields = {"move": move, "name": "t", "round": number, "first": first}
    return moves.copy(Message("copy_rows", fields))


def put(moves: TableMoves, answer: Message, **fields: Any) -> None:
    fields = {"move": "m", "name": NEW.name, "shift": 0, **fields}
    fields |= {name: answer.fields[name] for name in ("slots", "initials")}
    moves.put(Message("put_rows", fields, answer.arrays))


def test_rows_that_are_sent_twice_are_there_once(store) -> None:
    moves = TableMoves(store)
    begin(moves)
    for _ in range(2):  # an answer was lost: the same round is copied again
        answer = copy(moves)
        assert sorted(answer.arrays[2].tolist()) == [0, 1, 2, 3, 4]
        put(moves, answer)
    new = store.keyed_shards[NEW.name]
    assert len(new.keyed.rows) == 5
    np.testing.assert_array_equal(
        new.pulled(None, np.arange(5)), store.pull_rows("t", np.arange(5))
    )
    np.testing.assert_array_equal(new.pulled("v", np.arange(5)), np.ones((5, 2)))


def test_a_round_has_what_changed_and_what_was_removed(store) -> None:
    moves = TableMoves(store)
    begin(moves)
    put(moves, copy(moves))
    rows = store.keyed_shards["t"].keyed.rows
    rows.remove(rows.find(np.array([3, 1])))
    store.update({}, {"t": (np.array([1, 4, 9]), np.ones((3, 2), np.float32))})
    answer = copy(moves, 1)
    assert sorted(answer.arrays[0].tolist()) == [1, 3]
    assert sorted(answer.arrays[2].tolist()) == [1, 4, 9]
    put(moves, answer)
    new = store.keyed_shards[NEW.name].keyed.rows
    assert sorted(new.index.keys[new.used].tolist()) == [0, 1, 2, 4, 9]
    assert new.counts[new.find(np.array([1, 4]))].tolist() == [1, 2]
    assert answer.fields["left_bytes"] == 0


def test_another_move_ends_the_first(store) -> None:
    moves = TableMoves(store)
    begin(moves)
    put(moves, copy(moves))
    begin(moves, "other")
    assert len(store.keyed_shards[NEW.name].keyed.rows) == 0
    with pytest.raises(UnavailableError, match="was restarted while keyed tables were moved"):
        copy(moves)
    assert len(copy(moves, move="other").arrays[2]) == 5


def test_dropped_shards_end_the_move(store) -> None:
    moves = TableMoves(store)
    begin(moves)
    moves.drop(Message("drop_tables", {"names": [NEW.name, "not there"]}))
    assert store.names == ["t"]
    assert store.keyed_shards["t"].keyed.rows.removed is None
    with pytest.raises(UnavailableError, match="was restarted"):
        copy(moves)


def test_layouts_are_recorded(store) -> None:
    changes = store.num_changes
    TableMoves(store).place(Message("place_tables", {"layouts": {"t": {"generation": 1}}}))
    assert store.layouts == {"t": {"generation": 1}}
    assert store.num_changes > changes  # the journal has them

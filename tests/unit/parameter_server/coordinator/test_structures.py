"""Structures of arguments and results."""

from __future__ import annotations

import collections
from typing import Any

import pytest

import stratagem as sg
from stratagem.parameter_server.coordinator.remote_value import leaves_of, map_structure
from stratagem.variables.distributed import PerReplica

Pair = collections.namedtuple("Pair", ["first", "second"])


class Leaf:
    """What JAX does not know."""


LEAF = Leaf()
STRUCTURES: list[tuple[Any, Any]] = [
    (1, "1"),
    (None, None),
    ([1, (2, None), []], ["1", ("2", None), []]),
    ({"b": 1, 2: {"a": [3]}}, {"b": "1", 2: {"a": ["3"]}}),
    (Pair(1, {"x": 2}), Pair("1", {"x": "2"})),
    (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b="1", a="2")),
]


@pytest.mark.parametrize(("value", "expected"), STRUCTURES)
def test_leaves_are_replaced_and_structures_kept(value, expected) -> None:
    got = map_structure(str, value)
    assert got == expected
    assert type(got) is type(expected)
    assert repr(got) == repr(expected)  # in the same order


def test_what_is_declared_a_leaf_is_not_taken_apart() -> None:
    def is_leaf(value: Any) -> bool:
        return isinstance(value, tuple | Leaf)

    assert map_structure(lambda leaf: leaf, [LEAF, (1, 2)], is_leaf) == [LEAF, (1, 2)]
    assert leaves_of({"b": (1, 2), "a": [3, None, LEAF]}, is_leaf) == [(1, 2), 3, LEAF]


def test_values_of_replicas_are_taken_apart_as_jax_does() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    value = {"x": strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)}
    got = map_structure(lambda leaf: leaf + 1, value)
    assert isinstance(got["x"], PerReplica)
    assert [int(sg.select_replica(place, got["x"])) for place in (0, 1)] == [1, 2]

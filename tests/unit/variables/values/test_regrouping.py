"""regroup, and select_replica as its inverse."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.variables.distributed import Mirrored, PerReplica
from stratagem.variables.regrouping import is_array, is_per_replica, regroup, select_replica


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def two() -> Topology:
    return Topology(find_devices(["cpu:0", "cpu:1"]))


@pytest.fixture
def three() -> Topology:
    return Topology(find_devices(["cpu:0", "cpu:1", "cpu:2"]))


def test_structures_become_one_structure_of_per_replica_and_back(two) -> None:
    values = [
        Pair({"a": np.full(2, i), "b": [np.float32(i), (i + 0.5,)]}, collections.OrderedDict(c=-i))
        for i in range(2)
    ]
    joined = regroup(values, two)
    assert type(joined) is Pair
    assert type(joined.second) is collections.OrderedDict
    leaves = jax.tree.leaves(joined, is_leaf=is_per_replica)
    assert len(leaves) == 4
    assert all(is_per_replica(leaf) for leaf in leaves)
    for index, value in enumerate(values):
        selected = select_replica(index, joined)
        assert jax.tree.structure(selected) == jax.tree.structure(value)
        jax.tree.map(np.testing.assert_array_equal, selected, value)


def test_components_lie_on_the_devices_of_their_replicas(three) -> None:
    joined = regroup([np.float32(index) for index in range(3)], three)
    assert [part.devices().pop().id for part in joined.components] == [0, 1, 2]


def test_numpy_values_get_the_dtype_that_jax_gives_them(two) -> None:
    assert regroup([np.float64(1), np.float64(2)], two).stacked.dtype == np.float32
    assert regroup([1, 2], two).stacked.dtype == np.int32
    assert regroup([True, False], two).stacked.dtype == bool
    halves = np.ones(1, ml_dtypes.bfloat16)
    assert regroup([halves, halves], two).stacked.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "value", [7, 2.5, 1 + 2j, True, "text", None, b"raw", print, frozenset({1})]
)
def test_object_that_is_the_same_on_all_replicas_comes_back_as_it_is(three, value) -> None:
    assert regroup([value] * 3, three) is value
    assert regroup([{"a": [value]}] * 3, three) == {"a": [value]}


def test_equal_arrays_are_still_one_a_replica(two) -> None:
    array = jnp.ones(2)
    assert is_per_replica(regroup([array, array], two))


@pytest.mark.parametrize(
    "column",
    [
        ["a", "b"],
        ["a", 1],
        [1, 2.5],
        [1, True],
        [np.ones(1), "a"],
        [np.ones(1, np.float32), np.ones(1, np.int32)],
        [np.ones((2, 3)), np.ones((2, 4))],
        [np.ones(2), np.ones((2, 2))],
        [np.float32(1.0), np.ones(1, np.float32)],
        [np.array(["a", "b"]), np.array(["a", "c"])],
        [np.array(["a"]), np.array(["a", "a"])],
    ],
    ids=repr,
)
def test_what_cannot_be_one_array_stays_as_objects(two, column) -> None:
    joined = regroup(column, two)
    assert joined.stacked is None
    for part, value in zip(joined.components, column, strict=True):
        assert part is value


def test_equal_text_arrays_come_back_as_they_are(two) -> None:
    texts = [np.array(["a", "b"]), np.array(["a", "b"])]
    assert regroup(texts, two) is texts[0]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_parts_of_unequal_length_are_padded_with_true_rows(lengths) -> None:
    topology = Topology(find_devices(["cpu:0", "cpu:1", "cpu:2"]))
    whole = np.arange(2.0 * sum(lengths), dtype=np.float32).reshape(-1, 2)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    joined = regroup(parts, topology)
    assert joined.stacked.shape == (3, max(lengths), 2)
    assert joined.lengths == (None if len(set(lengths)) == 1 else tuple(lengths))
    for part, expected in zip(joined.components, parts, strict=True):
        np.testing.assert_array_equal(part, expected)
    rows = np.asarray(joined.stacked).reshape(-1, 2).tolist()
    assert all(row in whole.tolist() for row in rows)


def test_distributed_value_that_all_replicas_share_comes_back_as_it_is(two) -> None:
    shared = [regroup([1.0, 2.0], two), Mirrored(3.0)]
    joined = regroup([shared, shared], two)
    assert joined[0] is shared[0]
    assert joined[1] is shared[1]


def test_one_structure_comes_back_as_it_is() -> None:
    value = {"a": object()}
    assert regroup([value]) is value


def test_without_a_topology_components_may_come_from_anywhere() -> None:
    parts = [jax.device_put(np.float32(index), jax.devices()[index]) for index in range(3)]
    joined = regroup([{"a": part} for part in parts])
    np.testing.assert_array_equal(joined["a"].components, [0, 1, 2])
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x)(joined["a"].stacked), [0, 2, 4])


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="regroup received no values"):
        regroup([])


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, r"at `\['c'\]`"),
        ({"a": 1}, {"a": 1, "b": 2}, r"at `\['b'\]`"),
        ({"a": [1, {"x": 2}]}, {"a": [1, {"x": (2, 3)}]}, r"at `\['a'\]\[1\]\['x'\]\[0\]`"),
        ((1, 2), (1, 2, 3), r"at `\[2\]`"),
        ((1, 2), 1, "at ``"),
        ([1, 2], (1, 2), "in the type of a container"),
        (1, None, "at ``"),
    ],
)
def test_different_structures_are_refused_with_the_place(two, first, second, place) -> None:
    with pytest.raises(
        ValueError, match=f"Replica 1 has the structure .* which differs {place} from replica 0's"
    ):
        regroup([first, second], two)


def test_another_number_of_replicas_than_the_topology_has_is_refused(three) -> None:
    with pytest.raises(ValueError, match="Received 2 values for 3 replicas"):
        regroup([np.ones(2), np.ones(2)], three)


def test_select_replica_reads_mirrored_and_plain_leaves_on_every_replica(two) -> None:
    structure = {"m": Mirrored(3.0), "p": regroup([1, 2], two), "plain": [None, "text"]}
    assert select_replica(1, structure) == {"m": 3.0, "p": 2, "plain": [None, "text"]}


def test_select_replica_leaves_padding_out(two) -> None:
    short = regroup([np.arange(3), np.arange(1)], two)
    np.testing.assert_array_equal(select_replica(1, short), [0])


@pytest.mark.parametrize("replica_id", [-1, 2, 5])
def test_replica_that_does_not_exist_is_refused(two, replica_id) -> None:
    with pytest.raises(IndexError, match=rf"{replica_id} is out of range(?s:.)*replica_id < 2"):
        select_replica(replica_id, [regroup([1, 2], two)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones(1), True),
        (np.ones(1), True),
        (np.float32(1), True),
        (np.ones(1, ml_dtypes.bfloat16), True),
        (jax.random.key(0), True),
        (1.0, False),
        ([1.0], False),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (np.datetime64("2020-01-01"), False),
        (PerReplica(objects=(1, 2)), False),
    ],
)
def test_is_array_is_true_for_types_that_jax_supports(value, expected) -> None:
    assert is_array(value) is expected

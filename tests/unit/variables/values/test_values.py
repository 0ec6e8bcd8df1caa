"""PerReplica and Mirrored: components, pytrees, and rejected uses of PerReplica."""

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

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.variables.distributed import (
    Mirrored,
    PerReplica,
    is_array,
    is_per_replica,
    regroup,
    select_replica,
)
from tests.unit.test_rendering import require_plain

ROWS = np.arange(12, dtype=np.float32).reshape(3, 2, 2)


@pytest.fixture
def three() -> Topology:
    return Topology(find_devices(["cpu:2", "cpu:0", "cpu:1"]))


@pytest.fixture
def per_replica(three) -> PerReplica:
    """[0. | 1. | 2.]."""
    return PerReplica(stacked=three.stack([np.float32(index) for index in range(3)]))


def test_components_lie_on_their_devices_in_replica_order(three) -> None:
    components = PerReplica(stacked=three.stack(list(ROWS))).components
    np.testing.assert_array_equal(components, ROWS)
    assert [part.devices().pop().id for part in components] == [2, 0, 1]


def test_components_are_cut_to_their_true_rows(three) -> None:
    value = PerReplica(stacked=three.stack(list(ROWS)), lengths=(2, 1, 0))
    for part, row, length in zip(value.components, ROWS, (2, 1, 0), strict=True):
        np.testing.assert_array_equal(part, row[:length])


@pytest.mark.parametrize("form", ["a copy on every device", "split on another axis", "on the host"])
def test_components_do_not_depend_on_where_the_array_lies(three, form) -> None:
    rows = np.arange(9.0, dtype=np.float32).reshape(3, 3)
    placed = {
        "a copy on every device": jax.device_put(rows, three.replicated),
        "split on another axis": jax.device_put(rows, three.stacked_steps),
        "on the host": rows,
    }
    np.testing.assert_array_equal(PerReplica(stacked=placed[form]).components, rows)


def test_components_of_a_value_in_a_compiled_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"belongs to a compiled step(?s:.)*strategy.reduce"):
        _ = PerReplica(local=jnp.ones(2)).components


def test_repr_shows_the_components(three, per_replica) -> None:
    assert repr(per_replica) == "PerReplica[0.0 | 1.0 | 2.0]"
    assert f"{per_replica}" == "PerReplica[0.0 | 1.0 | 2.0]"
    assert repr(PerReplica(objects=("a", 1))) == "PerReplica[a | 1]"
    assert repr(PerReplica(local="x")) == "PerReplica(local='x')"
    short = PerReplica(stacked=three.stack([np.ones(2, np.int32)] * 3), lengths=(2, 1, 0))
    assert repr(short) == "PerReplica[[1 1] | [1] | []]"


AS_AN_ARRAY = {
    "np.asarray(x)": np.asarray,
    "jnp.asarray(x)": jnp.asarray,
    "np.ones(3) + x": lambda x: np.ones(3) + x,
    "jnp.ones(3) + x": lambda x: jnp.ones(3) + x,
    "jnp.ones(3) @ x": lambda x: jnp.ones(3) @ x,
    "x @ np.ones(3)": lambda x: x @ np.ones(3),
    "x[0]": lambda x: x[0],
    "len(x)": len,
    "list(x)": list,
}
AS_A_NUMBER = {
    "float(x)": float,
    "int(x)": int,
    "complex(x)": complex,
    "round(x)": round,
    "abs(x)": abs,
    "range(x)": range,
    "-x": lambda x: -x,
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "x / 2": lambda x: x / 2,
    "2 * x": lambda x: 2 * x,
    "x**2": lambda x: x**2,
    "x < 1": lambda x: x < 1,
    "f'{x:.3f}'": lambda x: f"{x:.3f}",
}
AS_A_TRUTH_VALUE = {"bool(x)": bool}


@pytest.mark.parametrize(
    ("use", "words"),
    [
        pytest.param(use, words, id=name)
        for words, uses in [
            ("an array", AS_AN_ARRAY),
            ("a number", AS_A_NUMBER),
            ("a truth value", AS_A_TRUTH_VALUE),
        ]
        for name, use in uses.items()
    ],
)
def test_use_as_one_value_is_refused_with_a_fix(per_replica, use, words) -> None:
    ways = "strategy.local_results, strategy.reduce or strategy.gather"
    with pytest.raises(ValueError, match=f"A PerReplica was used as {words}(?s:.)*use {ways}"):
        use(per_replica)


def test_per_replica_is_a_pytree_that_keeps_its_lengths(three) -> None:
    value = PerReplica(stacked=three.stack(list(ROWS)), lengths=(2, 1, 1))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, value)
    assert isinstance(doubled, PerReplica)
    assert doubled.lengths == (2, 1, 1)
    np.testing.assert_array_equal(doubled.stacked, 2 * ROWS)
    assert jax.tree.structure(value) != jax.tree.structure(PerReplica(stacked=ROWS))
    assert repr(jax.eval_shape(lambda: value)).startswith("PerReplica(stacked=ShapeDtypeStruct(")
    assert value != PerReplica(stacked=value.stacked)  # by identity
    last = jax.jit(lambda value: value.components[2] + 1.0)(PerReplica(stacked=jnp.arange(3.0)))
    assert float(last) == 3.0


@pytest.mark.parametrize("value", [np.float32(2.5), jnp.float32(2.5), 2.5])
def test_mirrored_is_read_as_an_array(value) -> None:
    mirrored = Mirrored(value)
    assert float(mirrored) == 2.5
    assert int(mirrored) == 2
    assert np.asarray(mirrored) == np.float32(2.5)
    np.testing.assert_array_equal(jnp.asarray(mirrored), np.float32(2.5))
    np.testing.assert_array_equal(jnp.ones(2) * mirrored, [2.5, 2.5])
    np.testing.assert_array_equal(np.ones(2) * mirrored, [2.5, 2.5])
    assert np.asarray(Mirrored(jnp.arange(3)), dtype=np.float64).dtype == np.float64
    assert [bool(Mirrored(jnp.asarray(one))) for one in (False, 0.0, 3.0)] == [False, False, True]
    doubled = jax.jit(lambda value: jax.tree.map(lambda leaf: 2 * leaf, value))(Mirrored(ROWS))
    assert isinstance(doubled, Mirrored)
    np.testing.assert_array_equal(doubled.value, 2 * ROWS)
    texts = require_plain(Mirrored(jnp.arange(3))._repr_html_()).texts
    assert texts[5:] == ["all", "(3,)", "int32", "[0 1 2]"]


def test_mirrored_counts_like_its_value() -> None:
    two, three = Mirrored(jnp.float32(2.0)), Mirrored(3.0)
    results = [two + 1, 1 - two, two * three, 6 / two, two**2, -two, abs(-two)]
    assert [float(result) for result in results] == [3.0, -1.0, 6.0, 3.0, 4.0, -2.0, 2.0]
    assert bool(two < three)
    assert bool(three == 3.0)
    assert f"{two:.1f}" == "2.0"
    rows = Mirrored(jnp.arange(6.0).reshape(3, 2))
    assert (rows.shape, rows.dtype, rows.ndim, len(rows)) == ((3, 2), jnp.float32, 2, 3)
    np.testing.assert_array_equal(rows[1], [2.0, 3.0])
    assert [float(row[0]) for row in rows] == [0.0, 2.0, 4.0]
    assert not hasattr(rows, "no_such_thing")


def test_notebook_shows_the_components(three) -> None:
    value = PerReplica(stacked=three.put_stacked(ROWS), lengths=(2, 1, 0))
    texts = require_plain(value._repr_html_()).texts
    assert texts[:5] == ["PerReplica", "replica", "shape", "dtype", "value"]
    assert texts[5:9] == ["0", "(2, 2)", "float32", "[[0. 1.] [2. 3.]]"]
    assert texts[9:11] == ["1", "(1, 2)"]
    objects = PerReplica(objects=("<b>", 2))
    assert require_plain(objects._repr_html_()).texts[5:9] == ["0", "-", "str", "<b>"]
    assert objects.components == ("<b>", 2)
    html = PerReplica(objects=tuple(["x" * 1000] * 100))._repr_html_()
    assert "... 68 more" in html
    assert len(html) < 20_000


def test_values_in_a_step_are_not_shown() -> None:
    assert PerReplica(local=1.0)._repr_html_() is None
    found = []
    jax.make_jaxpr(lambda x: found.append(PerReplica(stacked=x)._repr_html_()))(ROWS)
    assert found == [None]


# regroup, and select_replica as its inverse.


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def two() -> Topology:
    return Topology(find_devices(["cpu:0", "cpu:1"]))


def test_structures_become_one_structure_of_per_replica_and_back(two) -> None:
    values = [
        Pair({"a": np.full(2, i), "b": [np.float32(i), (i + 0.5,)]}, collections.OrderedDict(c=-i))
        for i in range(2)
    ]
    joined = regroup(values, two)
    assert type(joined) is Pair
    assert type(joined.second) is collections.OrderedDict
    dtypes = [
        regroup([one, one], two).stacked.dtype
        for one in (np.float64(1), np.array(True), np.ones(1, ml_dtypes.bfloat16))
    ]
    assert dtypes == [np.float32, bool, ml_dtypes.bfloat16]  # those that JAX gives
    leaves = jax.tree.leaves(joined, is_leaf=is_per_replica)
    assert len(leaves) == 4
    assert all(is_per_replica(leaf) for leaf in leaves)
    for index, value in enumerate(values):
        selected = select_replica(index, joined)
        assert jax.tree.structure(selected) == jax.tree.structure(value)
        jax.tree.map(np.testing.assert_array_equal, selected, value)


@pytest.mark.parametrize(
    "value", [7, 2.5, 1 + 2j, True, "text", None, b"raw", print, frozenset({1})]
)
def test_object_that_is_the_same_on_all_replicas_comes_back_as_it_is(three, value) -> None:
    assert regroup([value] * 3, three) is value
    assert regroup([{"a": [value]}] * 3, three) == {"a": [value]}
    texts = [np.array(["a", "b"]) for _ in range(3)]
    assert regroup(texts, three) is texts[0]
    assert is_per_replica(regroup([jnp.ones(2)] * 3, three))  # arrays are one a replica
    assert regroup([{"a": value}]) == {"a": value}
    for values in ([], [np.ones(2)] * 2):
        with pytest.raises(ValueError, match=r"regroup received no values|2 values for 3 replicas"):
            regroup(values, three)


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


def test_without_a_topology_components_may_come_from_anywhere() -> None:
    parts = [jax.device_put(np.float32(index), jax.devices()[index]) for index in range(3)]
    joined = regroup([{"a": part} for part in parts])
    np.testing.assert_array_equal(joined["a"].components, [0, 1, 2])
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x)(joined["a"].stacked), [0, 2, 4])


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


def test_select_replica_reads_mirrored_and_plain_leaves_on_every_replica(two) -> None:
    structure = {"m": Mirrored(3.0), "p": regroup([1, 2], two), "plain": [None, "text"]}
    assert select_replica(1, structure) == {"m": 3.0, "p": 2, "plain": [None, "text"]}
    short = regroup([np.arange(3), np.arange(1)], two)
    np.testing.assert_array_equal(select_replica(1, short), [0])  # without padding


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


# IndexedSlices: dense form, combined rows, and mismatched parts.

ROWS_OF_INDEXED_SLICES = sg.IndexedSlices(
    jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([2, 0, 2]), (4, 2)
)
WHOLE = np.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])


def test_rows_of_equal_index_count_as_their_sum() -> None:
    np.testing.assert_array_equal(ROWS_OF_INDEXED_SLICES.to_dense(), WHOLE)
    np.testing.assert_array_equal(jnp.asarray(ROWS_OF_INDEXED_SLICES), WHOLE)
    combined = ROWS_OF_INDEXED_SLICES.combined()
    assert combined.indices.tolist() == [0, 2]
    assert combined.values.tolist() == [[3.0, 4.0], [6.0, 8.0]]
    assert combined.dense_shape == (4, 2)


def test_in_a_compiled_program_rows_left_over_are_past_the_end() -> None:
    combined = jax.jit(lambda rows: rows.combined())(ROWS_OF_INDEXED_SLICES)
    assert combined.indices.tolist() == [0, 2, np.iinfo(np.int32).max]
    assert combined.values.tolist() == [[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]]
    np.testing.assert_array_equal(combined.to_dense(), WHOLE)


def test_negative_indices_count_from_the_end() -> None:
    rows = sg.IndexedSlices(jnp.ones(2), jnp.array([-1, 3]), (4,))
    np.testing.assert_array_equal(rows.to_dense(), [0, 0, 0, 2])
    assert rows.combined().indices.tolist() == [3]


def test_indices_that_a_tree_map_made_floats_are_refused() -> None:
    halved = jax.tree.map(lambda leaf: 0.5 * leaf.astype("float32"), ROWS_OF_INDEXED_SLICES)
    for use in (halved.to_dense, halved.combined):
        with pytest.raises(TypeError, match="indices of dtype float32"):
            use()


@pytest.mark.parametrize(
    ("values", "indices", "dense_shape", "words"),
    [
        ((2, 3), (3,), (4, 3), r"values of shape \(2, 3\) and indices of shape \(3,\)"),
        ((2, 3), (2, 1), (4, 3), r"indices of shape \(2, 1\)"),
        ((), (), None, r"values of shape \(\)"),
        ((2, 3), (2,), (4, 2), r"rows of shape \(3,\) and dense_shape=\(4, 2\)"),
        ((2, 3), (2,), None, "without dense_shape"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values, indices, dense_shape, words) -> None:
    slices = sg.IndexedSlices(np.ones(values), np.zeros(indices, int), dense_shape)
    with pytest.raises(ValueError, match=words):
        slices.to_dense()

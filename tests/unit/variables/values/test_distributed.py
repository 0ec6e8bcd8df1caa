"""PerReplica and Mirrored: components, pytrees, and rejected uses of PerReplica."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.variables.distributed import DistributedValues, Mirrored, PerReplica
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


def test_components_that_are_objects_come_as_they_are() -> None:
    objects = ("a", np.ones(3), None)
    assert PerReplica(objects=objects).components is objects


@pytest.mark.parametrize("form", ["a copy on every device", "split on another axis", "on the host"])
def test_components_do_not_depend_on_where_the_array_lies(three, form) -> None:
    rows = np.arange(9.0, dtype=np.float32).reshape(3, 3)
    placed = {
        "a copy on every device": jax.device_put(rows, three.replicated),
        "split on another axis": jax.device_put(rows, three.stacked_steps),
        "on the host": rows,
    }
    np.testing.assert_array_equal(PerReplica(stacked=placed[form]).components, rows)


def test_components_can_be_traced() -> None:
    last = jax.jit(lambda value: value.components[2] + 1.0)(PerReplica(stacked=jnp.arange(3.0)))
    assert float(last) == 3.0


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


def test_repr_of_what_jax_puts_into_a_pytree_does_not_fail(per_replica) -> None:
    shapes = jax.eval_shape(lambda: per_replica)
    assert repr(shapes) == "PerReplica(stacked=ShapeDtypeStruct(shape=(3,), dtype=float32))"


AS_AN_ARRAY = {
    "np.asarray(x)": np.asarray,
    "np.mean(x)": np.mean,
    "jnp.asarray(x)": jnp.asarray,
    "jnp.sum(x)": jnp.sum,
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
    "math.sqrt(x)": math.sqrt,
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
AS_A_TRUTH_VALUE = {"bool(x)": bool, "1 if x else 2": lambda x: 1 if x else 2}


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


def test_per_replica_is_compared_by_identity_and_can_be_a_key(per_replica) -> None:
    other = PerReplica(stacked=per_replica.stacked)
    assert per_replica != other
    assert len({per_replica, other, per_replica}) == 2


@pytest.mark.parametrize("value", [np.float32(2.5), jnp.float32(2.5), 2.5])
def test_mirrored_is_read_as_an_array(value) -> None:
    mirrored = Mirrored(value)
    assert float(mirrored) == 2.5
    assert int(mirrored) == 2
    assert np.asarray(mirrored) == np.float32(2.5)
    np.testing.assert_array_equal(jnp.asarray(mirrored), np.float32(2.5))
    np.testing.assert_array_equal(jnp.ones(2) * mirrored, [2.5, 2.5])
    np.testing.assert_array_equal(np.ones(2) * mirrored, [2.5, 2.5])


def test_mirrored_becomes_an_array_of_the_dtype_asked_for() -> None:
    array = np.asarray(Mirrored(jnp.arange(3)), dtype=np.float64)
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, [0, 1, 2])


@pytest.mark.parametrize(("value", "truth"), [(False, False), (0.0, False), (3.0, True)])
def test_mirrored_is_as_true_as_its_value(value, truth) -> None:
    assert bool(Mirrored(jnp.asarray(value))) is truth


def test_mirrored_is_a_pytree() -> None:
    doubled = jax.jit(lambda value: jax.tree.map(lambda leaf: 2 * leaf, value))(Mirrored(ROWS))
    assert isinstance(doubled, Mirrored)
    np.testing.assert_array_equal(doubled.value, 2 * ROWS)


def test_both_are_distributed_values(per_replica) -> None:
    assert isinstance(per_replica, DistributedValues)
    assert isinstance(Mirrored(1.0), DistributedValues)
    assert not isinstance(1.0, DistributedValues)


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


def test_large_components_and_many_replicas_are_shortened() -> None:
    html = PerReplica(objects=tuple(["x" * 1000] * 100))._repr_html_()
    assert "... 68 more" in html
    assert len(html) < 20_000


def test_values_in_a_step_are_not_shown() -> None:
    assert PerReplica(local=1.0)._repr_html_() is None
    found = []
    jax.make_jaxpr(lambda x: found.append(PerReplica(stacked=x)._repr_html_()))(ROWS)
    assert found == [None]


def test_mirrored_value_is_shown_once() -> None:
    texts = require_plain(Mirrored(jnp.arange(3))._repr_html_()).texts
    assert texts[5:] == ["all", "(3,)", "int32", "[0 1 2]"]

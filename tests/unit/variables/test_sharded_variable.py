"""Variables of a list, that are one: compared with NumPy, and with one variable."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.variables.row_methods import CHANGES

VALUES = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
ENDS = [4, 7]
ROWS = np.random.default_rng(1).uniform(1, 2, size=(4, 3)).astype("float32")
IDS = np.array([9, 0, 4, 3])
BATCH_CHANGES = [*CHANGES, ("batch_scatter_update", lambda now, rows: rows)]


# Of a test whose rows are many, or dear.
_seldom_keras = pytest.mark.parametrize(
    "made", [pytest.param("keras", marks=pytest.mark.slow), "mirrored"], indirect=True
)


@pytest.fixture(params=["keras", "mirrored"])
def made(request: pytest.FixtureRequest) -> sg.ShardedVariable:
    """Of variables of no strategy, and of one that has scatter methods of its own."""
    if request.param == "keras":
        return sg.ShardedVariable([keras.Variable(part) for part in np.split(VALUES, ENDS)])
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return sg.ShardedVariable([sg.Variable(part) for part in np.split(VALUES, ENDS)], "table")


def test_it_is_as_its_shards_together_are(made) -> None:
    assert made.shape == (10, 3)
    assert made.ndim == 2
    assert made.dtype == "float32"
    assert made.name in ("ShardedVariable", "table")
    assert len(made) == 3
    assert [shard.shape for shard in made] == [(4, 3), (3, 3), (3, 3)]
    assert all(one is other for one, other in zip(made, made.variables, strict=True))
    assert "shape=(10, 3), dtype=float32, 3 shards" in repr(made)
    made.variables.clear()
    assert len(made.variables) == 3


def test_it_reads_as_one_array(made) -> None:
    for read in (made.value, made.numpy(), np.asarray(made), jnp.asarray(made), made[...]):
        np.testing.assert_array_equal(read, VALUES)
        assert read.dtype == np.float32
    assert isinstance(made.value, jax.Array)
    assert isinstance(made.numpy(), np.ndarray)
    assert np.asarray(made, "float64").dtype == np.float64
    np.testing.assert_allclose(keras.ops.sum(made), VALUES.sum(), rtol=1e-5)


def test_only_shards_that_have_the_rows_are_read() -> None:
    class Noted(keras.Variable):
        reads = 0

        @property
        def value(self) -> Any:
            self.reads += 1
            return super().value

    shards = [Noted(part) for part in np.split(VALUES, ENDS)]
    made = sg.ShardedVariable(shards)
    for shard in shards:
        shard.reads = 0
    np.testing.assert_array_equal(made[[8, 1]], VALUES[[8, 1]])
    assert [shard.reads for shard in shards] == [1, 0, 1]


def test_values_are_assigned_added_and_subtracted(made) -> None:
    assert made.assign(VALUES * 2) is made
    np.testing.assert_array_equal(made, VALUES * 2)
    assert made.assign_add(VALUES) is made
    assert made.assign_sub(jnp.asarray(VALUES)) is made
    np.testing.assert_allclose(made, VALUES * 2, rtol=1e-6)
    made.assign_add([1.0, 2.0, 3.0])
    made.assign_sub(jnp.asarray(0.5))
    np.testing.assert_allclose(made, VALUES * 2 + [0.5, 1.5, 2.5], rtol=1e-5, atol=1e-6)
    made.assign(keras.Variable(VALUES))
    np.testing.assert_array_equal(made.variables[1].value, VALUES[4:7])


@pytest.mark.parametrize(("method", "change"), BATCH_CHANGES)
@_seldom_keras
def test_scattered_rows_reach_their_shards(made, method, change) -> None:
    expected = VALUES.copy()
    expected[IDS] = change(VALUES[IDS], ROWS)
    assert getattr(made, method)(sg.IndexedSlices(ROWS, IDS)) is made
    np.testing.assert_allclose(made, expected, rtol=1e-6)


def test_repeated_negative_and_missing_rows(made) -> None:
    made.scatter_add(sg.IndexedSlices(np.ones((4, 3)), np.array([5, -5, 5, 10])))
    expected = VALUES.copy()
    expected[5] += 3
    np.testing.assert_allclose(made, expected, rtol=1e-6)


@pytest.mark.parametrize("ids", [[0, 3, 4, 9], [[6, 6], [-1, -10]], 7, [10, 2, -11], []])
@_seldom_keras
def test_lookups_are_those_of_one_table(made, ids) -> None:
    ids = np.array(ids, "int32")
    expected = sg.nn.embedding_lookup(keras.Variable(VALUES), ids)
    np.testing.assert_array_equal(sg.nn.embedding_lookup(made, ids), expected)
    traced = jax.jit(lambda ids: sg.nn.embedding_lookup(made, ids))(ids.astype("int8"))
    np.testing.assert_array_equal(traced, expected)


def _whole_numbers(value: np.ndarray) -> keras.Variable:
    return keras.Variable(value, dtype="int32")


@_seldom_keras
def test_gradients_of_lookups_are_those_of_the_shards(made) -> None:
    def loss() -> Any:
        return jnp.sum(jnp.square(sg.nn.embedding_lookup(made, [3, 5, 3])))

    value, gradients = sg.value_and_grad(loss, made.variables)
    expected = np.zeros_like(VALUES)
    for row in (3, 5, 3):
        expected[row] += 2 * VALUES[row]
    np.testing.assert_allclose(value, np.square(VALUES[[3, 5, 3]]).sum(), rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(gradients), expected, rtol=1e-6)


def test_optimizers_take_the_shards(made) -> None:
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(made.variables)
    value, gradients = sg.value_and_grad(lambda: jnp.sum(keras.ops.square(made)), made.variables)
    np.testing.assert_allclose(value, np.square(VALUES).sum(), rtol=1e-5)
    optimizer.apply(gradients, made.variables)
    np.testing.assert_allclose(made, VALUES - VALUES, atol=1e-6)


@pytest.mark.parametrize(
    "is_eager",
    [
        pytest.param(False, id="compiled"),
        pytest.param(True, id="eager", marks=pytest.mark.slow),
    ],
)
def test_it_is_used_in_a_step(is_eager) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        parts = [sg.Variable(part, aggregation="mean") for part in np.split(VALUES, ENDS)]
    made = sg.ShardedVariable(parts)

    def step(ids: Any) -> Any:
        read = made[3:5], made[-1, 1], made.value
        made.scatter_add(sg.IndexedSlices(jnp.ones((2, 3)), ids))
        made.assign_add(jnp.full((10, 3), 2.0))
        return read

    sg.config.run_eagerly(is_eager)
    try:
        results = strategy.run(step, args=(jnp.array([9, 4]),))
    finally:
        sg.config.run_eagerly(False)
    rows, element, whole = sg.select_replica(1, results)
    np.testing.assert_array_equal(rows, VALUES[3:5])
    np.testing.assert_array_equal(element, VALUES[-1, 1])
    np.testing.assert_array_equal(whole, VALUES)
    expected = VALUES + 2
    expected[[9, 4]] += 1
    np.testing.assert_allclose(made, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
@_seldom_keras
def test_it_counts_as_its_value_in_arithmetic(made, name) -> None:
    function = getattr(operator, name)
    positive = np.abs(VALUES) + 1
    made.assign(positive)
    for other in (2.5, positive, jnp.asarray(positive)):
        np.testing.assert_allclose(function(made, other), function(positive, other), rtol=1e-5)
        np.testing.assert_allclose(function(other, made), function(other, positive), rtol=1e-5)
    np.testing.assert_allclose(function(made, made), function(positive, positive), rtol=1e-5)


def test_it_counts_as_its_value_in_comparisons_and_products(made) -> None:
    for function in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        np.testing.assert_array_equal(function(made, 0.3), function(VALUES, 0.3))
    for function in (operator.neg, operator.pos, operator.abs):
        np.testing.assert_array_equal(function(made), function(VALUES))
    np.testing.assert_allclose(made @ np.ones(3, "float32"), VALUES.sum(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.ones(10, "float32") @ made, VALUES.sum(0), rtol=1e-4, atol=1e-6)
    bits = sg.ShardedVariable([_whole_numbers(np.array([1, 6])), _whole_numbers(np.array([5]))])
    assert (bits & 3).tolist() == [1, 2, 1]
    assert (8 | bits).tolist() == [9, 14, 13]
    assert (bits ^ 1).tolist() == [0, 7, 4]
    assert (~bits).tolist() == [-2, -7, -6]


@pytest.mark.parametrize(
    "variables",
    [
        [],
        None,
        keras.Variable(VALUES),
        [VALUES],
        [keras.Variable(VALUES), VALUES],
        {"a": keras.Variable(VALUES)},
    ],
    ids=["empty", "none", "variable", "array", "mixed", "mapping"],
)
def test_shards_that_are_no_variables_are_refused(variables) -> None:
    with pytest.raises(TypeError, match="a non-empty list of Keras variables"):
        sg.ShardedVariable(variables)


def test_shards_that_do_not_fit_are_refused() -> None:
    whole = keras.Variable(VALUES)
    with pytest.raises(ValueError, match=r"shards of dtypes \['float32', 'bfloat16'\]"):
        sg.ShardedVariable([whole, keras.Variable(VALUES, dtype="bfloat16")])
    for other in (VALUES[:, :2], VALUES[0], VALUES[..., None]):
        with pytest.raises(ValueError, match=r"received shards of shapes \[\(10, 3\)"):
            sg.ShardedVariable([whole, keras.Variable(other)])
    with pytest.raises(ValueError, match=r"received shards of shapes \[\(\)\]"):
        sg.ShardedVariable([keras.Variable(1.0)])


def test_values_that_do_not_fit_are_refused(made) -> None:
    for method, value in [
        ("assign", np.ones((9, 3))),
        ("assign", 1.0),
        ("assign_add", np.ones((9, 3))),
        ("assign_sub", np.ones((2, 10, 3))),
    ]:
        with pytest.raises(ValueError, match=rf"{method} of sharded variable .* received a value"):
            getattr(made, method)(value)
    with pytest.raises(TypeError, match=r"scatter_add of sharded variable .* of type ndarray"):
        made.scatter_add(VALUES)
    with pytest.raises(ValueError, match="one index per row"):
        made.scatter_add(sg.IndexedSlices(ROWS, IDS[:2]))
    np.testing.assert_array_equal(made, VALUES)

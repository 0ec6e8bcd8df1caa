"""`reduce` and `gather`: the table of the contract, with its numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import InvalidArgumentError
from tests.contract.parts import (
    assert_parts,
    assert_plain,
    contribution,
    parts_of_all,
    replica_ids,
    split,
)


def rows(strategy: sg.Strategy, *parts: list[float]):
    """The parts for the first replicas; the others hold no rows."""
    return split(strategy, lambda i: jnp.array(parts[i] if i < len(parts) else [], dtype="float32"))


def test_equal_parts_are_reduced_over_replicas_or_over_rows_as_well(distributing) -> None:
    n = distributing.num_replicas_in_sync
    value = split(distributing, lambda i: jnp.array([[1.0, 2.0], [3.0, 6.0]][i % 2]))
    sums = np.array([4.0, 8.0]) * n / 2  # [4, 8] and 12 with 2 replicas
    assert_plain(distributing.reduce("SUM", value, axis=None), sums)
    assert_plain(distributing.reduce("MEAN", value, axis=None), [2.0, 4.0])
    assert_plain(distributing.reduce("SUM", value, axis=0), 12.0 * n / 2)
    assert_plain(distributing.reduce("MEAN", value, axis=0), 3.0)


@pytest.mark.parametrize(
    ("parts", "total", "mean"),
    [
        pytest.param(([1.0, 2.0], [6.0]), 9.0, 3.0, id="short_last_part"),
        pytest.param(([3.0, 5.0], []), 8.0, 4.0, id="replica_without_examples"),
    ],
)
def test_unequal_parts_are_reduced_over_true_rows(distributing, parts, total, mean) -> None:
    value = rows(distributing, *parts)
    for op in ("SUM", "MEAN"):
        with pytest.raises(InvalidArgumentError, match="received parts with"):
            distributing.reduce(op, value, axis=None)
    assert_plain(distributing.reduce("SUM", value, axis=0), total)
    assert_plain(distributing.reduce("MEAN", value, axis=0), mean)


def test_plain_value_under_several_replicas(distributing) -> None:
    for plain in (4.0, jnp.float32(4.0), np.float32(4.0)):
        with pytest.raises(ValueError, match=r"received a plain value .* to SUM over \d+ replicas"):
            distributing.reduce("SUM", plain, axis=None)
        assert_plain(distributing.reduce("MEAN", plain, axis=None), 4.0)
        with pytest.raises(ValueError, match="plain value"):
            distributing.reduce("SUM", plain, axis=0)
        with pytest.raises(ValueError, match="received a scalar and axis=0"):
            distributing.reduce("MEAN", plain, axis=0)


def test_number_that_a_step_returns_is_refused_with_what_to_return(distributing, execution) -> None:
    number = distributing.run(lambda: 2)
    with pytest.raises(ValueError, match=r"(?s)plain value 2 to SUM.*return an array from the ste"):
        distributing.reduce("SUM", number, axis=None)
    with pytest.raises(ValueError, match=r"(?s)to SUM.*pass the result of `run`"):
        distributing.reduce("SUM", jnp.float32(2.0), axis=None)
    array = distributing.run(lambda: jnp.asarray(2))
    assert distributing.reduce("SUM", array, axis=None) == 2 * distributing.num_replicas_in_sync


@pytest.mark.parametrize(
    "combine",
    [
        pytest.param(sum, id="sum"),
        pytest.param(lambda parts: jnp.stack(parts).sum(axis=0), id="stack"),
        pytest.param(lambda parts: jax.jit(sum)(list(parts)), id="jit"),
    ],
)
def test_local_results_combine_whatever_devices_they_are_on(strategy, execution, combine) -> None:
    def step():
        return {"loss": contribution(), "rows": jnp.arange(2, dtype="int32")}

    result = strategy.run(step)
    ids = replica_ids(strategy)
    assert_plain(combine(strategy.local_results(result["loss"])), sum(1.0 + i for i in ids))
    trees = strategy.local_results(result)
    assert_plain(combine([tree["rows"] for tree in trees]), [0, len(ids)])
    # Each part is still where its replica is, and combines with a value of another device.
    places = [part.devices() for part in strategy.local_results(result["loss"])]
    assert len({device for place in places for device in place}) == len(places)
    own = jax.device_put(jnp.float32(1.0), jax.local_devices(backend="cpu")[-1])
    assert float(own + strategy.local_results(result["loss"])[-1]) == 2.0 + ids[-1]


@pytest.mark.parametrize("axis", [None, 0])
def test_strings_are_gathered_and_have_no_sum(strategy, axis) -> None:
    n = strategy.num_replicas_in_sync
    names = np.array([f"row {index}" for index in range(2 * n - 1)])
    (batch,) = strategy.distribute_dataset([names])
    np.testing.assert_array_equal(strategy.gather(batch, axis=0), names)
    with pytest.raises(TypeError, match=r"(?s)reduce received .*row \d.*strategy.local_results"):
        strategy.reduce("MEAN", batch, axis=axis)


def test_plain_value_under_one_replica(sole) -> None:
    for plain in (4.0, jnp.float32(4.0)):
        for op in ("SUM", "MEAN"):
            assert_plain(sole.reduce(op, plain, axis=None), 4.0)
            with pytest.raises(ValueError, match="received a scalar and axis=0"):
                sole.reduce(op, plain, axis=0)
    array = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    assert_plain(sole.reduce("SUM", array, axis=0), [4.0, 8.0])
    assert_plain(sole.reduce("MEAN", array, axis=(0, 1)), 3.0)


@pytest.mark.parametrize("axis", [0, 1, -1, -2, (0, 1), [0], (1,), (-1, 0)], ids=str)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_over_axes_is_that_of_all_parts_together(strategy, op, axis) -> None:
    n = strategy.num_replicas_in_sync
    parts = np.random.default_rng(0).normal(size=(n, 3, 2)).astype("float32")
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    over = (0, *(one % 2 + 1 for one in axes))
    expected = parts.sum(over) if op == "SUM" else parts.mean(over)
    got = strategy.reduce(op, split(strategy, lambda i: jnp.asarray(parts[i])), axis=axis)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert got.shape == expected.shape


def test_reduce_takes_the_result_of_run(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    own = split(strategy, lambda i: jnp.array([i, 1.0], "float32"))
    result = strategy.run(lambda mine: {"x": mine, "twice": 2 * mine}, args=(own,))
    if n > 1:
        total = strategy.reduce("sum", result, axis=None)
        assert_plain(total["x"], [n * (n - 1) / 2, n])
        assert_plain(total["twice"], [n * (n - 1), 2 * n])
    assert_plain(strategy.reduce(sg.ReduceOp.MEAN, result, axis=0)["x"], (n - 1) / 4 + 0.5)


@pytest.mark.parametrize("op", ["sum", "Sum", "SUM", sg.ReduceOp.SUM], ids=str)
def test_op_is_taken_by_name_in_any_case(strategy, op) -> None:
    n = strategy.num_replicas_in_sync
    value = split(strategy, lambda i: jnp.int32(i + 1))
    total = strategy.reduce(op, value, axis=None)
    assert_plain(total, n * (n + 1) // 2)
    assert total.dtype == jnp.int32


@pytest.mark.parametrize("op", ["max", "", None, 3, True], ids=repr)
def test_unknown_op_is_refused(strategy, op) -> None:
    with pytest.raises(ValueError, match=r"reduce_op=.* is not a reduction"):
        strategy.reduce(op, split(strategy, lambda i: jnp.float32(i)), axis=None)


@pytest.mark.parametrize("axis", [1.0, "0", (0, "1"), True, (None,)], ids=repr)
def test_axis_of_another_type_is_refused(strategy, axis) -> None:
    with pytest.raises(TypeError, match=r"reduce received axis=.*\n.*None, an int"):
        strategy.reduce("sum", split(strategy, lambda _: jnp.ones(2)), axis=axis)


@pytest.mark.parametrize("axis", [1, -2, 5, (0, 1)], ids=repr)
def test_axis_out_of_range_is_refused(strategy, axis) -> None:
    with pytest.raises(ValueError, match=r"reduce received axis=-?\d, out of range"):
        strategy.reduce("sum", split(strategy, lambda _: jnp.ones(2)), axis=axis)


def test_axis_is_required(strategy) -> None:
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("sum", 1.0)


def test_mean_of_integers_is_a_float_and_sum_keeps_the_dtype(distributing) -> None:
    n = distributing.num_replicas_in_sync
    value = split(distributing, lambda i: jnp.array([i, i + 1], "int32"))
    for axis, total, mean in [
        (None, [n * (n - 1) // 2, n * (n + 1) // 2], [(n - 1) / 2, (n + 1) / 2]),
        (0, n * n, n / 2),
    ]:
        got = distributing.reduce("sum", value, axis=axis)
        assert got.dtype == jnp.int32
        assert_plain(got, total)
        assert_plain(distributing.reduce("mean", value, axis=axis), mean)


def test_gather_concatenates_true_rows_in_replica_order(distributing) -> None:
    value = rows(distributing, [1.0, 2.0], [6.0])
    for gather in (distributing.gather, distributing.concat):
        assert_plain(gather(value, axis=0), [1.0, 2.0, 6.0])
    assert parts_of_all(distributing, value)[1].shape == (1,)


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
def test_gather_along_any_axis(strategy, execution, axis) -> None:
    n = strategy.num_replicas_in_sync
    parts = np.random.default_rng(1).normal(size=(n, 2, 3, 1)).astype("float32")
    value = split(strategy, lambda i: jnp.asarray(parts[i]))
    got = strategy.gather(strategy.run(lambda mine: {"a": mine}, args=(value,)), axis=axis)
    np.testing.assert_array_equal(got["a"], np.concatenate(list(parts), axis=axis))


def test_gather_leaves_a_plain_value_as_it_is(strategy) -> None:
    plain = jnp.array([[1.0, 2.0]])
    assert strategy.gather(plain, axis=0) is plain


def test_gather_of_scalars_and_of_a_bad_axis_says_so(distributing) -> None:
    scalars = split(distributing, lambda i: jnp.float32(i))
    with pytest.raises(ValueError, match="gather received a scalar and axis=0"):
        distributing.gather(scalars, axis=0)
    vectors = split(distributing, lambda _: jnp.ones(2))
    for axis in (1, -2):
        with pytest.raises(ValueError, match=f"gather received axis={axis}, out of range"):
            distributing.gather(vectors, axis=axis)
    with pytest.raises(TypeError, match="gather received axis=None of type NoneType"):
        distributing.gather(vectors, axis=None)


def test_gather_of_parts_that_do_not_fit_is_refused(distributing) -> None:
    sizes = split(distributing, lambda i: jnp.ones((2, i + 1)))
    with pytest.raises(InvalidArgumentError, match="gather along axis 0"):
        distributing.gather(sizes, axis=0)
    n = distributing.num_replicas_in_sync
    assert distributing.gather(sizes, axis=1).shape == (2, n * (n + 1) // 2)
    ranks = split(distributing, lambda i: jnp.ones((2,) * (i % 2 + 1)))
    with pytest.raises(InvalidArgumentError, match="gather along axis 0"):
        distributing.gather(ranks, axis=0)


def test_local_results_are_the_true_parts_of_this_process(strategy) -> None:
    value = split(strategy, lambda i: jnp.full((i % 2 + 1,), float(i)))
    assert_parts(strategy, value, lambda i: np.full((i % 2 + 1,), float(i)))
    assert strategy.local_results is not None
    for plain in (7, None, "a", [1, 2], {"k": 1}):
        assert strategy.local_results(plain) == (plain,)


def test_distribute_values_from_function_calls_it_once_a_local_replica(strategy) -> None:
    seen = []

    def value_of(context):
        seen.append(context)
        return {"id": 10 * context.replica_id_in_sync_group, "fixed": (3, "text", None)}

    value = strategy.experimental_distribute_values_from_function(value_of)
    n = strategy.num_replicas_in_sync
    assert seen == [sg.ValueContext(i, n) for i in replica_ids(strategy)]
    assert_parts(strategy, value["id"], lambda i: 10 * i)
    assert_parts(strategy, value["fixed"][0], lambda _: 3)
    assert value["fixed"][1:] == ("text", None)


def test_distribute_values_of_different_structure_are_refused(distributing) -> None:
    with pytest.raises(ValueError, match=r"(?s)has the structure.*differs at `\[\d\]"):
        split(distributing, lambda i: [1.0] * (i + 1))

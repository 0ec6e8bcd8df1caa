"""`all_reduce` and `all_gather`: values, gradients, dtypes, errors, and JAX's transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import stratagem as sg
from stratagem.errors import InvalidArgumentError
from tests.contract.parts import assert_parts, contribution, replica_id, split


def all_reduce(op, value):
    """Call in a replica function."""
    return sg.get_replica_context().all_reduce(op, value)


def all_gather(value, axis=0):
    """Call in a replica function."""
    return sg.get_replica_context().all_gather(value, axis)


def test_structure_is_reduced_leaf_by_leaf(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    def step():
        mine = contribution()
        tree = {"a": mine, "b": [jnp.stack([mine, -mine]), (mine * mine,)]}
        return all_reduce("sum", tree), all_reduce(sg.ReduceOp.MEAN, tree)

    total, mean = strategy.run(step)
    ids = np.arange(1.0, n + 1)
    for tree, reduced in [(total, np.sum), (mean, np.mean)]:
        assert_parts(strategy, tree["a"], lambda _, r=reduced: r(ids))
        assert_parts(strategy, tree["b"][0], lambda _, r=reduced: [r(ids), -r(ids)])
        assert_parts(strategy, tree["b"][1][0], lambda _, r=reduced: r(ids**2))


def test_gradient_of_all_reduce_is_the_reduction_of_the_incoming_ones(strategy, execution) -> None:
    """Incoming [2. | 5. | 8. | ...]: with two replicas 7. for SUM and 3.5 for MEAN."""
    n = strategy.num_replicas_in_sync
    incoming = split(strategy, lambda i: jnp.float32(2 + 3 * i))

    def step(cotangent):
        x = contribution()
        return [
            jax.vjp(lambda y, op=op: all_reduce(op, y), x)[1](cotangent)[0]
            for op in ("sum", "mean")
        ]

    total, mean = strategy.run(step, args=(incoming,))
    stated = 2 * n + 3 * n * (n - 1) / 2
    assert_parts(strategy, total, lambda _: stated)
    assert_parts(strategy, mean, lambda _: stated / n)


def test_gathered_parts_stand_in_replica_order_on_every_replica(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    parts = np.random.default_rng(2).normal(size=(n, 2, 3)).astype("float32")
    own = split(strategy, lambda i: jnp.asarray(parts[i]))
    result = strategy.run(
        lambda x: {axis: all_gather({"x": x}, axis)["x"] for axis in (0, 1, -1)}, args=(own,)
    )
    for axis, value in result.items():
        assert_parts(strategy, value, lambda _, a=axis: np.concatenate(list(parts), axis=a))


def test_gradient_of_all_gather_is_the_sum_of_the_slices_of_its_own_part(
    strategy, execution
) -> None:
    """Replica r sends back (r + 1) * [0, 1, 2, ...]; replica i receives the sum of its own rows."""
    n = strategy.num_replicas_in_sync

    def step(x):
        incoming = contribution() * jnp.arange(2.0 * n, dtype="float32")
        return jax.vjp(all_gather, x)[1](incoming)[0]

    result = strategy.run(step, args=(jnp.ones(2),))
    assert_parts(strategy, result, lambda i: np.array([2 * i, 2 * i + 1]) * n * (n + 1) / 2)


def test_parts_of_unequal_length_are_gathered_without_padding(distributing, execution) -> None:
    n = distributing.num_replicas_in_sync
    own = split(distributing, lambda i: jnp.full(2 if i < n - 1 else 1, float(i)))
    result = distributing.run(all_gather, args=(own,))
    expected = np.concatenate([np.full(2 if i < n - 1 else 1, float(i)) for i in range(n)])
    assert_parts(distributing, result, lambda _: expected)


@pytest.mark.parametrize(
    ("dtype", "of_sum", "of_mean"),
    [
        ("bool", "int32", "float32"),
        ("int32", "int32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_sum_keeps_the_dtype_and_mean_of_integers_is_a_float(
    strategy, execution, dtype, of_sum, of_mean
) -> None:
    n = strategy.num_replicas_in_sync

    def step():
        mine = jnp.ones(2, dtype)
        return all_reduce("sum", mine), all_reduce("mean", mine)

    for value, wanted, number in zip(strategy.run(step), (of_sum, of_mean), (n, 1), strict=True):
        assert {part.dtype.name for part in strategy.local_results(value)} == {wanted}
        assert_parts(strategy, value, lambda _, number=number: np.full(2, number))


def test_python_number_counts_once_a_replica(strategy, execution) -> None:
    value = strategy.run(lambda: all_reduce("sum", 2.0) + 0.0)
    n = strategy.num_replicas_in_sync
    for part in strategy.local_results(value):
        assert float(part) == 2.0 * n


def test_collectives_work_under_jit(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    @jax.jit
    def inner(x):
        return all_reduce("sum", x), all_gather(x[None])

    total, gathered = strategy.run(lambda: inner(contribution()))
    assert_parts(strategy, total, lambda _: n * (n + 1) / 2)
    assert_parts(strategy, gathered, lambda _: np.arange(1.0, n + 1))


def test_collectives_and_merge_call_work_under_cond(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    def merge(s, v):
        return s.reduce("mean", v, axis=None)

    def chosen(flag):
        return lax.cond(
            flag,
            lambda x: all_reduce("sum", x) + all_gather(x[None])[-1],
            lambda x: sg.get_replica_context().merge_call(merge, args=(x,)),
            contribution(),
        )

    both = strategy.run(
        lambda flags: (chosen(flags[0]), chosen(flags[1])), args=(jnp.array([True, False]),)
    )
    assert_parts(strategy, both[0], lambda _: n * (n + 1) / 2 + n)
    assert_parts(strategy, both[1], lambda _: (n + 1) / 2)


def test_collectives_and_merge_call_work_under_scan(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    def merge(s, v):
        return s.extended.reduce_to("sum", v, None)

    def body(carry, x):
        carry = all_reduce("mean", carry) + x
        merged = sg.get_replica_context().merge_call(merge, args=(carry,))
        return carry, all_gather(carry[None]) + merged

    def step():
        return lax.scan(body, contribution(), jnp.array([1.0, 2.0, 3.0]))

    last, rows = strategy.run(step)
    mean = (n + 1) / 2
    carries = [mean + 1, mean + 3, mean + 6]
    assert_parts(strategy, last, lambda _: carries[-1])
    assert_parts(strategy, rows, lambda _: [[carry * (1 + n)] * n for carry in carries])


def test_gradients_pass_through_jit_cond_and_scan(strategy, execution) -> None:
    """d/dx of 3 x (sum over replicas) in a loop of 2, seen from replica i: 9 n^2."""
    n = strategy.num_replicas_in_sync

    @jax.jit
    def looped(x):
        def body(carry, _):
            total = lax.cond(True, lambda c: all_reduce("sum", c), lambda c: c, carry)
            return 3.0 * total, None

        return lax.scan(body, x, None, length=2)[0]

    gradient = strategy.run(lambda: jax.grad(looped)(contribution()))
    assert_parts(strategy, gradient, lambda _: 9.0 * n * n)


def test_merge_call_can_be_differentiated(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    def merge(s, v):
        return s.reduce("sum", v, axis=None)

    def total(x):
        return sg.get_replica_context().merge_call(merge, args=(x * x,))

    def step():
        return jax.grad(total)(contribution())

    if execution == "eager" and n > 1:
        with pytest.raises(RuntimeError, match="use all_reduce or all_gather"):
            strategy.run(step)
        return
    assert_parts(strategy, strategy.run(step), lambda i: 2.0 * (i + 1) * n)


def test_replicas_may_loop_by_their_own_id(strategy, execution) -> None:
    """Control flow that differs between replicas is fine where no collective is inside it."""
    result = strategy.run(
        lambda: lax.cond(
            jnp.asarray(sg.get_replica_context().replica_id_in_sync_group) == 0,
            lambda: jnp.float32(1.0),
            lambda: replica_id() + 10.0,
        )
    )
    assert_parts(strategy, result, lambda i: 1.0 if i == 0 else i + 10.0)


def test_pure_step_runs_inside_an_outer_jit(strategy) -> None:
    n = strategy.num_replicas_in_sync

    @jax.jit
    def outer(x):
        value = strategy.run(
            lambda y: {"sum": all_reduce("sum", y), "rows": y[None] + replica_id()}, args=(x,)
        )
        return (
            strategy.reduce("mean", value["sum"], axis=None),
            strategy.reduce("mean", value["rows"], axis=0),
            strategy.gather(value["rows"], axis=0),
        )

    total, mean, rows = outer(jnp.float32(2.0))
    assert float(total) == 2.0 * n
    np.testing.assert_allclose(mean, 2.0 + (n - 1) / 2)
    np.testing.assert_allclose(rows, 2.0 + np.arange(n))


@pytest.mark.parametrize("op", ["max", None, 3], ids=repr)
def test_unknown_op_is_refused(strategy, execution, op) -> None:
    with pytest.raises(ValueError, match=r"reduce_op=.* is not a reduction"):
        strategy.run(lambda: all_reduce(op, contribution()))


def test_gather_of_a_scalar_or_along_a_bad_axis_is_refused(strategy, execution) -> None:
    with pytest.raises(ValueError, match="all_gather received a scalar and axis=0"):
        strategy.run(lambda: all_gather(contribution()))
    for axis in (1, -2):
        with pytest.raises(ValueError, match=f"all_gather received axis={axis}, out of range"):
            strategy.run(lambda axis=axis: all_gather(jnp.ones(2), axis))
    with pytest.raises(TypeError, match="all_gather received axis='0' of type str"):
        strategy.run(lambda: all_gather(jnp.ones(2), "0"))


def test_shapes_that_do_not_fit_are_refused_eagerly(distributing) -> None:
    def sized():
        return jnp.ones((2, sg.get_replica_context().replica_id_in_sync_group + 1))

    sg.config.run_eagerly(True)
    try:
        with pytest.raises(InvalidArgumentError, match="all_reduce received parts with shapes"):
            distributing.run(lambda: all_reduce("sum", sized()))
        with pytest.raises(InvalidArgumentError, match="all_gather"):
            distributing.run(lambda: all_gather(sized(), axis=0))
    finally:
        sg.config.run_eagerly(False)


def test_default_context_has_the_collectives_of_one_replica() -> None:
    context = sg.get_replica_context()
    assert float(context.all_reduce("sum", jnp.float32(3.0))) == 3.0
    np.testing.assert_array_equal(context.all_gather(jnp.ones((2, 1)), axis=1), np.ones((2, 1)))

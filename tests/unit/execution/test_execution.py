"""Steps whose replicas hold different numbers of examples: only true ones count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import InvalidArgumentError

ROWS = {
    "short_last": ([0.0, 1.0], [2.0, 3.0], [4.0]),
    "empty_last": ([0.0, 1.0], [2.0, 3.0], []),
    "one_and_none": ([7.0], [], []),
    "empty_first": ([], [2.0], [3.0, 4.0]),
}


@pytest.fixture(scope="module")
def strategy():
    return sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture(params=["short_last", "one_and_none", "empty_first"])
def rows(request):
    return [np.array(part, "float32") for part in ROWS[request.param]]


def split(strategy, parts):
    return strategy.distribute_values_from_function(
        lambda context: jnp.asarray(parts[context.replica_id_in_sync_group], "float32")
    )


def parts_of(strategy, value):
    return [np.asarray(part) for part in strategy.local_results(value)]


def in_five_rows(value):
    """Makes the leading size another one than that of the batch, so that nothing is cut off."""
    return jnp.broadcast_to(value, (5, *value.shape))


def context():
    return sg.get_replica_context()


def test_eager_replicas_see_true_shapes(strategy, rows) -> None:
    shapes = []
    sg.config.run_eagerly(True)
    try:
        strategy.run(
            lambda x: shapes.append((x.shape, context().example_mask.shape)),
            args=(split(strategy, rows),),
        )
    finally:
        sg.config.run_eagerly(False)
    assert shapes == [((len(part),), (len(part),)) for part in rows]


def test_collectives_inside_count_true_rows(strategy, execution, rows) -> None:
    true = np.concatenate(rows)

    def reduce_replicas(s, v):
        return s.reduce("sum", v, axis=None)

    with pytest.raises(InvalidArgumentError, match="reduce with axis=None received parts"):
        strategy.run(
            lambda x: context().merge_call(reduce_replicas, args=(x,)),
            args=(split(strategy, rows),),
        )

    def merge(s, v):
        return {
            "sum": s.reduce("sum", v, axis=0),
            "mean": s.reduce("mean", v, axis=0),
            "gathered": in_five_rows(s.gather(v, axis=0)),
        }

    def step(x):
        inside = context().merge_call(merge, args=(x,))
        return {**inside, "again": in_five_rows(context().all_gather(x * 2.0, axis=0))}

    got = strategy.run(step, args=(split(strategy, rows),))
    expected = {
        "sum": true.sum(),
        "mean": true.mean(),
        "gathered": np.tile(true, (5, 1)),
        "again": np.tile(true * 2, (5, 1)),
    }
    for name, numbers in expected.items():
        for part in parts_of(strategy, got[name]):
            np.testing.assert_allclose(part, numbers, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_gradient_of_a_gather_ignores_padding(strategy, execution, rows) -> None:
    with strategy.scope():
        weight = sg.Variable(2.0)

    def step(x):
        def loss():
            return jnp.sum(context().all_gather(weight * x, axis=0) ** 2)

        return sg.value_and_grad(loss, [weight])

    value, (gradient,) = strategy.run(step, args=(split(strategy, rows),))
    squares = (np.concatenate(rows) ** 2).sum()
    for part in parts_of(strategy, value):
        np.testing.assert_allclose(part, 4 * squares, rtol=1e-6)
    local = [float(part) for part in parts_of(strategy, gradient)]
    np.testing.assert_allclose(local, [3 * 4 * (part**2).sum() for part in rows], rtol=1e-6)


def test_each_division_of_the_rows_is_its_own_program(strategy) -> None:
    calls = []

    def step(x):
        calls.append(x.shape)
        return x

    for name in ("short_last", "empty_last", "short_last"):
        value = strategy.run(step, args=(split(strategy, ROWS[name]),))
        assert [list(part) for part in parts_of(strategy, value)] == list(map(list, ROWS[name]))
    # Once each; and once more with a row more, to see that the result is rows.
    assert calls == [(2,), (3,), (2,), (3,)]


def test_results_as_long_as_a_part_by_chance_are_left_alone(strategy) -> None:
    """Three rows a replica at most, and three features: only what grows with the rows is rows."""

    def step(x):
        equal = context().all_reduce("sum", x)  # on all replicas, so that it has no true rows
        return x, jnp.sum(x, axis=0), x.T, jnp.sum(x, axis=1), equal

    value = strategy.distribute_values_from_function(
        lambda context: jnp.ones((3 if context.replica_id_in_sync_group == 0 else 1, 3))
    )
    results = strategy.run(step, args=(value,))
    lengths = [3, *[1] * (strategy.num_replicas_in_sync - 1)]
    for index, length in enumerate(lengths):
        parts = [sg.select_replica(index, one).shape for one in results]
        assert parts == [(length, 3), (3,), (3, 3), (length,), (3, 3)]


def test_a_function_that_takes_one_size_only_is_believed(strategy) -> None:
    value = strategy.distribute_values_from_function(
        lambda context: jnp.ones((3 if context.replica_id_in_sync_group == 0 else 1, 2))
    )
    result = strategy.run(lambda x: x.reshape(3, 2) + 1.0, args=(value,))
    assert sg.select_replica(1, result).shape == (1, 2)


# value_and_grad against jax.grad of the same function written without variables.


def test_no_variables_are_an_error_that_says_to_build_the_model() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(1)])

    def step():
        return sg.value_and_grad(lambda: jnp.sum(unbuilt(np.ones((2, 3)))), unbuilt.variables)

    for call in (step, lambda: strategy.run(step)):
        with pytest.raises(ValueError, match="build the model before reading"):
            call()
    with pytest.raises(ValueError, match=r"received \{\}, which holds no variables or arrays"):
        sg.value_and_grad(lambda: 2.0, {})


def test_failed_function_assigns_nothing() -> None:
    variable, counter = keras.Variable(3.0), keras.Variable(0.0)

    def loss():
        counter.assign_add(1.0)
        return variable * jnp.ones(2)

    with pytest.raises(ValueError, match=r"returned a value of shape \(2,\)"):
        sg.value_and_grad(loss, [variable])
    assert float(counter.value) == 0.0


def test_stochastic_layer_moves_its_seed_once() -> None:
    dropout = keras.layers.Dropout(0.5, seed=1)
    kernel = keras.Variable(np.ones((8,), "float32"))
    before = np.asarray(dropout.seed_generator.state.value)
    _, (gradient,) = sg.value_and_grad(
        lambda: keras.ops.sum(dropout(kernel, training=True)), [kernel]
    )
    after = np.asarray(dropout.seed_generator.state.value)
    assert not np.array_equal(before, after)
    assert set(np.unique(gradient)) == {0.0, 2.0}


def _params() -> dict[str, object]:
    return {"kernel": jnp.arange(6.0).reshape(3, 2), "biases": [jnp.ones(2), 0.5]}


def _loss(params) -> jax.Array:
    first, second = params["biases"]
    return jnp.sum(jnp.tanh(jnp.ones((4, 3)) @ params["kernel"] / 9 + first) * second)


def test_gradients_of_a_pytree_of_arrays_are_those_of_jax(tolerance) -> None:
    value, gradients = sg.value_and_grad(_loss, _params())
    expected_value, expected = jax.value_and_grad(_loss)(_params())
    np.testing.assert_allclose(value, expected_value, **tolerance("float32"))
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gradients, expected)


def test_gradients_by_arrays_keep_what_is_assigned_to_variables(in_replicas) -> None:
    counter = keras.Variable(0.0)

    def step(x):
        def loss(params):
            counter.assign_add(1.0)
            return jnp.sum(params["w"] * x) * 1.0, "rest"

        given = {"w": jnp.float32(2.0), "unused": jnp.ones(2)}
        return sg.value_and_grad(loss, given, has_aux=True)

    (value, aux), gradients = in_replicas(step, jnp.arange(3.0))
    assert (float(value), aux, float(gradients["w"])) == (6.0, "rest", 3.0)
    assert (gradients["unused"].tolist(), float(counter.value)) == ([0, 0], 1.0)


@pytest.fixture(params=[(1, False), (2, False), (2, True)])
def in_replicas(request):
    count, eagerly = request.param
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])
    sg.config.run_eagerly(eagerly)
    yield lambda fn, *args: jax.tree.map(
        lambda leaf: strategy.local_results(leaf)[0],
        strategy.run(fn, args=args),
        is_leaf=lambda leaf: isinstance(leaf, sg.PerReplica),
    )
    sg.config.run_eagerly(False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([jnp.ones(2), keras.Variable(1.0)], r"received a pytree of ArrayImpl, Variable\."),
        ([sg.PerReplica(stacked=jnp.ones(2))], r"received a pytree of PerReplica\."),
        ({"n": 3}, "cannot differentiate by an array of dtype int32"),
    ],
)
def test_what_cannot_be_differentiated_by_is_named(variables, message) -> None:
    with pytest.raises(TypeError, match=message):
        sg.value_and_grad(lambda *_: 1.0, variables)

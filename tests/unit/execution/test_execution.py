"""Steps whose replicas hold different numbers of examples: only true ones count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import InvalidArgumentError
from stratagem.execution.tracing.functionalize import ReplicaScope

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


def test_context_counts_true_examples(strategy, execution, rows) -> None:
    totals = []

    def step(_):
        totals.append(context().global_num_examples)
        return jnp.asarray(context().num_examples), jnp.sum(context().example_mask)

    counts, masked = strategy.run(step, args=(split(strategy, rows),))
    lengths = [len(part) for part in rows]
    assert [int(count) for count in parts_of(strategy, counts)] == lengths
    assert [int(count) for count in parts_of(strategy, masked)] == lengths
    assert set(totals) == {sum(lengths)}


def test_mask_says_which_rows_are_true(strategy, rows) -> None:
    """Compiled: all replicas have the padded size, and the first rows are the true ones."""
    size = max(len(part) for part in rows)
    shapes = []

    def step(x):
        shapes.append(x.shape)
        return in_five_rows(context().example_mask)

    mask = strategy.run(step, args=(split(strategy, rows),))
    assert shapes == [(size,)]
    for got, part in zip(parts_of(strategy, mask), rows, strict=True):
        np.testing.assert_array_equal(got[0], np.arange(size) < len(part))


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


@pytest.mark.slow
def test_results_by_example_are_cut_and_others_are_not(strategy, execution, rows) -> None:
    def step(x):
        return {
            "rows": x * 2.0,
            "matrix": jnp.stack([x, -x], axis=1),
            "scalar": jnp.float32(3.0),
            "fixed": jnp.arange(5.0),
            "second_axis": jnp.ones((4, 2)),
        }

    got = strategy.run(step, args=(split(strategy, rows),))
    for part, scaled, matrix in zip(
        rows, parts_of(strategy, got["rows"]), parts_of(strategy, got["matrix"]), strict=True
    ):
        np.testing.assert_array_equal(scaled, part * 2.0)
        np.testing.assert_array_equal(matrix, np.stack([part, -part], axis=1))
    assert [part.shape for part in parts_of(strategy, got["fixed"])] == [(5,)] * 3
    assert [part.shape for part in parts_of(strategy, got["second_axis"])] == [(4, 2)] * 3
    assert [float(part) for part in parts_of(strategy, got["scalar"])] == [3.0] * 3


def test_reduce_and_gather_of_results_count_true_rows(strategy, execution, rows) -> None:
    true = np.concatenate(rows)
    got = strategy.run(lambda x: x + 1.0, args=(split(strategy, rows),))
    np.testing.assert_allclose(strategy.reduce("sum", got, axis=0), (true + 1).sum())
    np.testing.assert_allclose(strategy.reduce("mean", got, axis=0), (true + 1).mean())
    np.testing.assert_array_equal(strategy.gather(got, axis=0), true + 1)
    with pytest.raises(InvalidArgumentError, match="reduce with axis=None received parts"):
        strategy.reduce("sum", got, axis=None)


def test_collectives_inside_count_true_rows(strategy, execution, rows) -> None:
    true = np.concatenate(rows)

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


def test_reduction_over_replicas_only_is_refused_inside_too(strategy, execution, rows) -> None:
    with pytest.raises(InvalidArgumentError, match="reduce with axis=None received parts"):
        strategy.run(
            lambda x: context().merge_call(lambda s, v: s.reduce("sum", v, axis=None), args=(x,)),
            args=(split(strategy, rows),),
        )


def test_masked_mean_of_ones_own_is_that_of_the_whole_batch(strategy, execution, rows) -> None:
    def step(x):
        total = jnp.sum(jnp.where(context().example_mask, x, 0.0))
        return context().all_reduce("sum", total) / context().global_num_examples

    got = strategy.run(step, args=(split(strategy, rows),))
    for part in parts_of(strategy, got):
        np.testing.assert_allclose(part, np.concatenate(rows).mean(), rtol=1e-6)


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


def test_one_replica_with_a_padded_argument_sees_true_rows_of_its_results() -> None:
    """Nothing is padded with one replica: what it is given is its own."""
    strategy = sg.MirroredStrategy(["cpu:0"])
    facts = []

    def step(x):
        facts.append((context().num_examples, context().global_num_examples))
        return x

    assert strategy.run(step, args=(jnp.arange(3.0),)).shape == (3,)
    assert facts == [(3, 3)]


def test_results_as_long_as_a_part_by_chance_are_left_alone(strategy) -> None:
    """Three rows a replica at most, and three features: only what grows with the rows is rows."""

    def step(x):
        return x, jnp.sum(x, axis=0), x.T, jnp.sum(x, axis=1)

    value = strategy.distribute_values_from_function(
        lambda context: jnp.ones((3 if context.replica_id_in_sync_group == 0 else 1, 3))
    )
    rows, features, columns, sums = strategy.run(step, args=(value,))
    lengths = [3, *[1] * (strategy.num_replicas_in_sync - 1)]
    for index, length in enumerate(lengths):
        parts = [sg.select_replica(index, one).shape for one in (rows, features, columns, sums)]
        assert parts == [(length, 3), (3,), (3, 3), (length,)]


def test_a_function_that_takes_one_size_only_is_believed(strategy) -> None:
    value = strategy.distribute_values_from_function(
        lambda context: jnp.ones((3 if context.replica_id_in_sync_group == 0 else 1, 2))
    )
    result = strategy.run(lambda x: x.reshape(3, 2) + 1.0, args=(value,))
    assert sg.select_replica(1, result).shape == (1, 2)


# value_and_grad against jax.grad of the same function written without variables.


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )


def test_gradients_of_a_model_are_those_of_jax(model, tolerance) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    def pure(weights):
        kernel, bias, last, shift = weights
        return jnp.mean((jnp.tanh(x @ kernel + bias) @ last + shift) ** 2)

    start = [jnp.asarray(variable.value) for variable in model.trainable_variables]
    expected_value, expected = jax.value_and_grad(pure)(start)
    value, gradients = sg.value_and_grad(
        lambda: keras.ops.mean(model(x) ** 2), model.trainable_variables
    )
    np.testing.assert_allclose(value, expected_value, **tolerance("float32"))
    assert len(gradients) == len(expected)
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, wanted, **tolerance("float32"))


def test_gradients_under_an_outer_jit_are_the_same(model) -> None:
    x = np.ones((2, 3), "float32")

    def loss():
        return keras.ops.sum(model(x))

    _, outside = sg.value_and_grad(loss, model.trainable_variables)
    _, inside = jax.jit(lambda: sg.value_and_grad(loss, model.trainable_variables))()
    for first, second in zip(outside, inside, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)


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


def test_function_that_returns_a_variable_has_its_gradient() -> None:
    variable = keras.Variable(3.0)
    value, (gradient,) = sg.value_and_grad(lambda: variable, [variable])
    assert (float(value), float(gradient)) == (3.0, 1.0)


def test_python_number_as_value_depends_on_nothing() -> None:
    value, gradients = sg.value_and_grad(lambda: 2.0, [keras.Variable(1.0)])
    assert float(value) == 2.0
    assert gradients == [None]


def test_the_same_variable_twice_has_the_same_gradient_twice() -> None:
    variable = keras.Variable(3.0)
    _, gradients = sg.value_and_grad(lambda: variable * variable, [variable, variable])
    assert [float(gradient) for gradient in gradients] == [6.0, 6.0]


def test_assignment_to_a_differentiated_variable_is_kept() -> None:
    variable = keras.Variable(3.0)

    def loss():
        value = variable * variable
        variable.assign(10.0)
        return value

    value, (gradient,) = sg.value_and_grad(loss, [variable])
    assert (float(value), float(gradient), float(variable.value)) == (9.0, 6.0, 10.0)


def test_failed_function_assigns_nothing() -> None:
    variable, counter = keras.Variable(3.0), keras.Variable(0.0)

    def loss():
        counter.assign_add(1.0)
        return variable * jnp.ones(2)

    with pytest.raises(ValueError, match=r"returned a value of shape \(2,\)"):
        sg.value_and_grad(loss, [variable])
    assert float(counter.value) == 0.0


def test_writes_and_doubts_reach_the_scope_around() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        weight, total = sg.Variable(3.0), sg.Variable(1.0, aggregation="sum")
    plain = keras.Variable(1.0)

    def loss():
        total.assign(jnp.float32(5.0))
        plain.assign(2.0)
        return weight * total

    scope = ReplicaScope(lambda variable: jnp.float32(4.0) if variable is weight else None)
    with scope:
        value, (gradient,) = sg.value_and_grad(loss, [weight])
        assert float(total.value) == 5.0
    assert (float(value), float(gradient)) == (20.0, 5.0)
    assert list(scope.writes.values()) == [total, plain]
    assert list(scope.unproven.values()) == [plain]
    assert float(plain.value) == 1.0


def test_stochastic_layer_moves_its_seed_once(model) -> None:
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


def test_gradient_by_an_unused_array_is_zero_and_aux_comes_through() -> None:
    (value, aux), gradients = sg.value_and_grad(
        lambda params: (params[0] ** 2, "rest"), (3.0, jnp.ones(2)), has_aux=True
    )
    assert (float(value), aux, float(gradients[0])) == (9.0, "rest", 6.0)
    assert gradients[1].tolist() == [0, 0]


def test_gradients_by_arrays_keep_what_is_assigned_to_variables(in_replicas) -> None:
    counter = keras.Variable(0.0)

    def step(x):
        def loss(params):
            counter.assign_add(1.0)
            return jnp.sum(params["w"] * x) * 1.0

        return sg.value_and_grad(loss, {"w": jnp.float32(2.0)})

    value, gradients = in_replicas(step, jnp.arange(3.0))
    assert (float(value), float(gradients["w"]), float(counter.value)) == (6.0, 3.0, 1.0)


@pytest.fixture(params=[(1, False), (1, True), (2, False), (2, True)])
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

"""Sends beside the steps: the same numbers as those of sends in a step's program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import StreamingDiLoCo
from stratagem.execution.analysis.row_effects import RowEffect
from stratagem.execution.context.replica import ReplicaBatch, ReplicaContext
from stratagem.keras.numerics import local_weights as fragment_sends
from stratagem.keras.numerics.metrics import effect_of_loss, is_by_rows, is_of_keras
from tests.parity.comparison import mirrored
from tests.unit.keras.numerics.decoder_blocks import Block, decoder, equations, fitted
from tests.unit.keras.replicas import per_replica

RNG = np.random.default_rng(5)
X = RNG.normal(size=(92, 4)).astype("float32")
Y = RNG.normal(size=(92, 40)).astype("float32")
BATCH = 12  # 8 steps an epoch


class Ways:
    """Trains with sends in the step and beside it. `steps` has those after which programs ran."""

    def __init__(self, monkeypatch) -> None:
        self._monkeypatch = monkeypatch
        self.steps: list[int] = []
        send = fragment_sends.FragmentSends.after_step

        def after_step(sends):
            send(sends)
            self.steps.append(sends._count._steps)

        monkeypatch.setattr(fragment_sends.FragmentSends, "after_step", after_step)

    def both(self, train):
        found = []
        for is_beside in (False, True):
            self._monkeypatch.setattr(
                fragment_sends, "runs_beside", lambda strategy, flag=is_beside: flag
            )
            self.steps.clear()
            found.append(train())
            assert is_beside or not self.steps
        return found


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


def made(method, *, count=2, size=1, **arguments: Any):
    keras.utils.set_random_seed(0)
    devices = [f"cpu:{index}" for index in range(count)]
    with sg.LocalUpdateStrategy(method, devices, replicas_per_island=size).scope():
        layers = [keras.layers.Input((4,)), keras.layers.Dense(32), keras.layers.Dense(40)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.02), "mse", **arguments)
    return model


def fit(model, epochs=1):
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)


def state_of(model):
    """Returns the global model, the own weights and all other state."""
    return [np.asarray(one.storage) for one in [*model.variables, *model.optimizer.variables]]


def assert_equal(one, other):
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "count", "size"),
    [
        (StreamingDiLoCo(period=4, fragments=2, overlap=2), 2, 1),
        (StreamingDiLoCo(period=5, fragments=1, overlap=1, own_share=0.0), 2, 1),
        (StreamingDiLoCo(period=6, fragments=2, overlap=5, warmup_steps=3), 3, 1),
        (StreamingDiLoCo(period=4, fragments=2, overlap=3, compression="int8"), 4, 2),
    ],
    ids=str,
)
def test_weights_are_those_of_sends_in_the_step(ways, method, count, size) -> None:
    def train():
        model = made(method, count=count, size=size)
        fit(model, epochs=2)
        fit(model)
        return state_of(model)

    assert_equal(*ways.both(train))
    assert ways.steps == list(range(1, 25))


METHOD = StreamingDiLoCo(period=4, fragments=2, overlap=3)


@pytest.mark.slow
def test_loops_on_the_devices_send_in_the_step(ways) -> None:
    """An epoch has two executions of 3 steps; its other steps and the next epoch's are single."""

    def train():
        model = made(METHOD, steps_per_execution=3)
        fit(model)
        model.steps_per_execution = 1
        model.make_train_function(force=True)
        fit(model)
        return state_of(model)

    assert_equal(*ways.both(train))
    assert ways.steps == list(range(7, 17))


class Intervene(keras.callbacks.Callback):
    """Calls a function after a step."""

    def __init__(self, step, function) -> None:
        super().__init__()
        self._step, self._function = step, function

    def on_train_batch_end(self, batch, logs=None) -> None:
        if batch + 1 == self._step:
            self._function(self.model)


def double_weights(model) -> None:
    model.set_weights([2 * one for one in model.get_weights()])


def turn_back(model) -> None:
    model.optimizer.iterations.assign(2)


@pytest.mark.slow
@pytest.mark.parametrize("change", [double_weights, turn_back], ids=["weights", "iterations"])
def test_variables_may_be_set_while_a_fragment_is_under_way(ways, change) -> None:
    """The fragments are sent after steps 2 and 4, and mixed in after steps 5 and 7."""

    def train():
        model = made(METHOD)
        model.fit(
            X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Intervene(4, change)]
        )
        return state_of(model)

    assert_equal(*ways.both(train))
    assert len(ways.steps) == 8
    assert ways.steps[4] == (3 if change is turn_back else 5)


def test_global_model_is_the_new_one_once_a_fragment_is_sent(ways) -> None:
    def train():
        model = made(METHOD)
        seen = []

        def look(model) -> None:
            seen.extend(model.get_weights())
            seen.append(model.predict(X, verbose=0))

        callbacks = [Intervene(step, look) for step in (1, 2, 3, 4)]
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return seen

    in_step, beside = ways.both(train)
    assert_equal(in_step, beside)
    first, second = beside[0], beside[5]
    assert np.any(first != second) or np.any(beside[2] != beside[7])


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpoint", [False, True], ids=["file", "checkpoint"])
def test_training_goes_on_from_a_file_of_a_fragment_under_way(
    ways, tmp_path, is_checkpoint
) -> None:
    """After 7 steps one fragment is under way: it was sent after step 6."""

    def train():
        model = made(METHOD)
        model.fit(X[:84], Y[:84], batch_size=BATCH, shuffle=False, verbose=0)
        if is_checkpoint:
            prefix = tmp_path / f"of way {len(list(tmp_path.iterdir()))}"
            path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(prefix)
            other = made(METHOD)
            other.optimizer.build(other.trainable_variables)
            sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
        else:
            model.save(tmp_path / "model.keras")
            with model.weights[0].distribute_strategy.scope():
                other = keras.saving.load_model(tmp_path / "model.keras")
        fit(other)
        return state_of(other)

    assert_equal(*ways.both(train))
    assert ways.steps[7:] == list(range(8, 16))


def loop(model, after_update=lambda: None, *, optimizers=None, wrap=lambda step: step):
    """Trains by hand; returns the results of the steps."""
    strategy = model.weights[0].distribute_strategy
    loss_fn = keras.losses.MeanSquaredError(reduction=None)

    def step(x, y):
        def loss():
            return sg.compute_average_loss(loss_fn(y, model(x)))

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        pairs = list(zip(gradients, model.trainable_variables, strict=True))
        for optimizer, part in optimizers or [(model.optimizer, slice(None))]:
            own, variables = zip(*pairs[part], strict=True)
            optimizer.apply(list(own), list(variables))
        return value if (found := after_update()) is None else found

    run = wrap(lambda batch: strategy.run(step, args=batch))
    dataset = sg.input.Dataset((X, Y), batch_size=BATCH)
    results = [run(batch) for batch in strategy.distribute_dataset(dataset)]
    return [np.stack(strategy.experimental_local_results(one)) for one in results]


@pytest.mark.slow
def test_own_loop_trains_to_what_sends_in_the_step_do(ways) -> None:
    def train():
        model = made(METHOD)
        return [*loop(model), *loop(model), *state_of(model)]

    assert_equal(*ways.both(train))
    assert ways.steps == list(range(1, 17))


@pytest.mark.slow
def test_step_that_uses_the_weights_after_its_update_sends_them_itself(ways) -> None:
    def train():
        model = made(METHOD)
        kernel = model.trainable_variables[0]
        return [*loop(model, lambda: keras.ops.sum(kernel)), *state_of(model)]

    assert_equal(*ways.both(train))
    assert not ways.steps


@pytest.mark.slow
def test_step_of_two_optimizers_sends_itself(ways) -> None:
    def train():
        model = made(METHOD)
        with model.weights[0].distribute_strategy.scope():
            other = keras.optimizers.SGD(0.05)
            other.build(model.trainable_variables[2:])
        optimizers = [(model.optimizer, slice(2)), (other, slice(2, None))]
        return [*loop(model, optimizers=optimizers), *state_of(model)]

    assert_equal(*ways.both(train))
    assert not ways.steps


# compute_average_loss and scale_regularization_loss: the losses of one's own training loop.


def _rows(*values: float) -> np.ndarray:
    return np.asarray(values, "float32")


def _on_replicas(parts: list[Any], **arguments: Any) -> tuple[list[float], float]:
    """The average loss that each replica computes of its part, and the sum over replicas."""
    strategy = mirrored(len(parts))
    shares = strategy.run(
        lambda losses, weights: sg.compute_average_loss(
            losses, **({} if weights is None else {"sample_weight": weights}), **arguments
        ),
        args=(
            per_replica(strategy, [part[0] for part in parts]),
            None if parts[0][1] is None else per_replica(strategy, [part[1] for part in parts]),
        ),
    )
    total = strategy.reduce("sum", shares, axis=None)
    return [float(share) for share in strategy.local_results(shares)], float(total)


def test_average_loss_outside_every_scope() -> None:
    losses = _rows(1, 2, 3)
    assert float(sg.compute_average_loss(losses, global_batch_size=8)) == 0.75
    assert float(sg.compute_average_loss(losses)) == 2.0
    assert float(sg.compute_average_loss(losses, sample_weight=_rows(1, 0, 1))) == np.float32(4 / 3)


def test_average_loss_with_weights_on_two_replicas(execution: str) -> None:
    part = (_rows(1, 2, 3), _rows(1, 0, 1))
    shares, total = _on_replicas([part, part])
    np.testing.assert_allclose(shares, [4 / 6, 4 / 6], rtol=1e-6)
    np.testing.assert_allclose(total, 8 / 6, rtol=1e-6)


def test_average_loss_divides_by_the_true_examples_of_a_short_batch(execution: str) -> None:
    _, total = _on_replicas([(_rows(1, 2), None), (_rows(6), None)])
    np.testing.assert_allclose(total, 9 / 3, rtol=1e-6)


def test_average_loss_divides_a_short_batch_by_the_batch_size_that_is_given(execution: str) -> None:
    _, total = _on_replicas([(_rows(1, 2), None), (_rows(6), None)], global_batch_size=4)
    np.testing.assert_allclose(total, 9 / 4, rtol=1e-6)


def test_average_loss_of_a_replica_without_examples_is_zero(execution: str) -> None:
    shares, total = _on_replicas([(_rows(3, 5), None), (_rows(), None)])
    assert shares == [4.0, 0.0]
    assert total == 4.0


def test_average_loss_of_nothing_is_zero() -> None:
    assert float(sg.compute_average_loss(_rows(1, 2), global_batch_size=0)) == 0.0
    assert float(sg.compute_average_loss(_rows())) == 0.0


def test_average_loss_adds_up_all_axes() -> None:
    losses = np.arange(6, dtype="float32").reshape(2, 3)
    weights = np.asarray([[2.0], [1.0]], "float32")
    assert float(sg.compute_average_loss(losses, weights, 2)) == (2 * 3 + 12) / 2


def test_average_loss_keeps_a_small_dtype() -> None:
    loss = sg.compute_average_loss(jnp.ones(4, "bfloat16"), _rows(1, 1, 0, 0), global_batch_size=8)
    assert (loss.dtype, float(loss)) == ("bfloat16", 0.25)


@pytest.mark.parametrize("size", [np.int64(8), np.asarray(8, "int32"), jnp.asarray(8)])
def test_batch_size_may_be_any_integer_scalar(size: Any) -> None:
    assert float(sg.compute_average_loss(_rows(1, 2, 3), global_batch_size=size)) == 0.75


def test_batch_size_may_be_traced() -> None:
    average = jax.jit(lambda size: sg.compute_average_loss(_rows(1, 2, 3), global_batch_size=size))
    assert float(average(8)) == 0.75
    assert float(average(0)) == 0.0


def test_average_loss_in_cross_replica_context_needs_a_batch_size() -> None:
    with mirrored(2).scope():
        with pytest.raises(
            RuntimeError, match="in cross-replica context without global_batch_size"
        ):
            sg.compute_average_loss(_rows(1, 2))
        assert float(sg.compute_average_loss(_rows(1, 2), global_batch_size=2)) == 1.5


def test_scalar_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="compute_average_loss received a scalar loss"):
        sg.compute_average_loss(1.0, global_batch_size=2)


@pytest.mark.parametrize("size", [2.0, True, "2", [2], np.asarray([2]), np.float32(2)])
def test_batch_size_that_is_no_integer_scalar_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="an integer scalar"):
        sg.compute_average_loss(_rows(1, 2), global_batch_size=size)


def test_negative_batch_size_is_refused() -> None:
    with pytest.raises(sg.errors.InvalidArgumentError, match="a number of examples, 0 or more"):
        sg.compute_average_loss(_rows(1, 2), global_batch_size=-1)


def test_regularization_loss_is_divided_by_the_replicas(execution: str) -> None:
    strategy = mirrored(2)
    shares = strategy.run(lambda: sg.scale_regularization_loss(_rows(1, 2)))
    assert [float(share) for share in strategy.local_results(shares)] == [1.5, 1.5]


def test_regularization_losses_may_come_as_a_list() -> None:
    assert float(sg.scale_regularization_loss([jnp.asarray(1.0), _rows(2, 3)])) == 6.0
    assert float(sg.scale_regularization_loss([])) == 0.0


def test_regularization_loss_in_cross_replica_context_is_refused() -> None:
    with (
        mirrored(2).scope(),
        pytest.raises(RuntimeError, match="scale_regularization_loss was called in cross-replica"),
    ):
        sg.scale_regularization_loss(_rows(1, 2))


@pytest.mark.parametrize(
    "execution", ["compiled", pytest.param("eager", marks=pytest.mark.slow)], indirect=True
)
def test_gradient_of_the_average_is_that_of_one_device(execution: str) -> None:
    strategy = mirrored(3)
    inputs, weight = _rows(1, 2, 4, 7), 3.0
    with strategy.scope():
        variable = sg.Variable(weight)

    def step(rows: Any) -> Any:
        _, (grad,) = sg.value_and_grad(
            lambda: sg.compute_average_loss(jnp.square(rows * variable.value)), [variable]
        )
        return grad

    parts = per_replica(strategy, [inputs[:2], inputs[2:], inputs[4:]])
    grad = strategy.reduce("sum", strategy.run(step, args=(parts,)), axis=None)
    np.testing.assert_allclose(float(grad), np.mean(2 * weight * inputs**2), rtol=1e-6)


# Dependence of losses on the rows of a batch, as their names and their programs show it.

SIZE = 4


def own_loss(function: Any) -> keras.losses.Loss:
    class OwnLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return function(y_true, y_pred)

    return OwnLoss(reduction=None)


def effect(loss: keras.losses.Loss, shape: tuple[int, ...] = (SIZE, 3)) -> RowEffect:
    strategy: Any = sg.get_strategy()
    context = ReplicaContext(strategy, batch=ReplicaBatch(size=SIZE))
    return effect_of_loss(loss, np.ones(shape, np.float32), np.ones(shape, np.float32), context)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1), RowEffect.ROWS),
        (lambda y, p: keras.ops.sum((y - p) ** 2), RowEffect.SUM),
        (lambda y, p: keras.ops.mean(y * p), RowEffect.MEAN),
        (lambda y, p: keras.ops.sum(y * p, axis=0), RowEffect.MIXED),
        (lambda y, p: keras.ops.max(p, axis=0), RowEffect.MIXED),
    ],
    ids=["rows", "sum", "mean", "several sums", "largest"],
)
def test_loss_of_ones_own_is_followed(function, expected) -> None:
    assert effect(own_loss(function)) is expected


def test_losses_of_keras_by_rows_and_arrays_without_rows_are_left_to_keras() -> None:
    assert effect(keras.losses.MeanSquaredError()) is RowEffect.UNKNOWN
    assert effect(own_loss(lambda y, p: keras.ops.sum(p)), (SIZE + 1, 3)) is RowEffect.UNKNOWN
    assert effect(own_loss(lambda y, p: keras.ops.sum(p)), ()) is RowEffect.UNKNOWN


def test_functions_of_keras_are_known_by_their_module() -> None:
    assert is_of_keras(keras.losses.mean_squared_error)
    assert is_of_keras(keras.losses.MeanSquaredError())
    assert not is_of_keras(own_loss)
    assert not is_of_keras(own_loss(len))


def test_functions_of_keras_that_mix_rows_are_the_exceptions() -> None:
    assert is_by_rows(keras.losses.mean_squared_error)
    assert not is_by_rows(keras.losses.dice)
    assert not is_by_rows(own_loss)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("circle", marks=pytest.mark.slow),
        "dice",
        "tversky",
        "mean_absolute_error",
        "huber",
    ],
)
def test_exceptions_are_the_losses_whose_rows_change_with_other_rows(name) -> None:
    """Changes one row of the predictions, and looks at the value of another."""
    function = getattr(keras.losses, name)
    rng = np.random.default_rng(0)
    labels = np.array([0, 1, 0, 1]) if name == "circle" else rng.integers(0, 2, (SIZE, 3))
    predictions = rng.random((SIZE, 3)).astype(np.float32)
    first = np.asarray(function(labels, predictions))
    predictions[1] = 1 - predictions[1]
    second = np.asarray(function(labels, predictions))
    depends = first.shape != (SIZE,) or not np.allclose(first[[0, 2, 3]], second[[0, 2, 3]])
    assert is_by_rows(function) is not depends


# `sg.remat`: blocks that are found in finished models, and the policies.


def _scope() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all").scope()


@functools.cache
def _reference() -> Any:
    return fitted(_scope())


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["full", "dots", "offload", "offload_dots", jax.checkpoint_policies.everything_saveable],
)
def test_fit_with_a_policy_equals_fit_without(policy: Any) -> None:
    losses, weights = fitted(_scope(), lambda model: sg.remat(model, policy))
    expected_losses, expected = _reference()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def _tower() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(4)(inputs)))


def test_repeated_blocks_are_found_inside_models_and_layers() -> None:
    model = decoder()
    blocks = [one for one in model.layers if isinstance(one, Block)]
    assert sg.remat(model) == blocks
    assert sg.remat(keras.Sequential([model, keras.layers.Dense(1)])) == blocks
    towers = [_tower(), _tower()]
    assert sg.remat(keras.Sequential([keras.Input((4,)), *towers])) == towers


def test_layers_are_chosen_by_pattern_or_as_objects() -> None:
    model = decoder()
    assert [one.name for one in sg.remat(model, layers="block_1$")] == ["block_1"]
    assert sg.remat(model, layers=model.layers[-1:]) == model.layers[-1:]


def test_none_turns_rematerialization_off() -> None:
    model = decoder()

    def num_recomputed() -> int:
        jaxpr = jax.make_jaxpr(lambda x: model(x))(np.ones((2, 4), "float32"))
        return len(equations(jaxpr.jaxpr, "remat2"))

    sg.remat(model)
    assert num_recomputed() == 2
    sg.remat(model, None)
    assert num_recomputed() == 0


def test_wrong_arguments_are_refused() -> None:
    model = decoder()
    with pytest.raises(ValueError, match="policy='minimal'"):
        sg.remat(model, "minimal")
    with pytest.raises(TypeError, match="remat received 3"):
        sg.remat(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="remat received 'block_0'"):
        sg.remat(model, layers=["block_0"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a layer that is not in the model, and found nothing"):
        sg.remat(model, layers=[keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="layers='decoder', and found nothing"):
        sg.remat(model, layers="decoder")
    with pytest.raises(ValueError, match="no layers, and found nothing"):
        sg.remat(_tower())

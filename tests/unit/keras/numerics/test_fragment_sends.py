"""Sends beside the steps: the same numbers as those of sends in a step's program."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import StreamingDiLoCo
from stratagem.keras.numerics import local_weights as fragment_sends

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


@pytest.mark.slow
def test_function_of_a_step_sends_in_its_program(ways) -> None:
    def train():
        model = made(METHOD)
        with model.weights[0].distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        return [*loop(model, wrap=sg.function), *state_of(model)]

    assert_equal(*ways.both(train))
    assert not ways.steps

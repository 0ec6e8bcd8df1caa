"""Training on local copies of the weights, against simulations in NumPy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import DiLoCo, LocalSGD, QuadraticPeriod
from tests.unit.keras.numerics.islands import BATCH, RATE, X, Y, fit, made, strategy_of, trained


def weights_of(model):
    kernel, bias = model.get_weights()
    return np.concatenate([kernel[:, 0], bias])


@pytest.mark.slow
def test_evaluation_and_prediction_use_the_global_model() -> None:
    model = made(LocalSGD(period=100))
    first = weights_of(model)
    fit(model)
    np.testing.assert_array_equal(weights_of(model), first)
    expected = X @ first[:4] + first[4]
    np.testing.assert_allclose(model.predict(X, verbose=0)[:, 0], expected, rtol=1e-5)
    loss = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    assert loss == pytest.approx(np.mean((expected - Y[:, 0]) ** 2), rel=1e-5)


def test_optimizer_state_is_each_replicas_own_and_new_weights_reach_all() -> None:
    model = made(LocalSGD(period=2), optimizer=keras.optimizers.Adam(RATE))
    fit(model)
    slots = [one for one in model.optimizer.variables if "momentum" in one.path]
    assert slots
    for slot in slots:
        parts = np.asarray(slot.storage)
        assert parts.shape == (3, *slot.shape)
        assert np.any(parts[0] != parts[1])
        np.testing.assert_allclose(np.asarray(slot.value), parts.mean(0), rtol=1e-6)
    assert int(model.optimizer.iterations) == 16
    new = [np.ones((4, 1), "float32"), np.zeros(1, "float32")]
    model.set_weights(new)
    for variable, value in zip(model.trainable_variables, new, strict=True):
        np.testing.assert_array_equal(variable.local_copy.storage, np.stack([value] * 3))


@pytest.mark.slow
def test_checkpoint_has_the_global_model_and_its_momentum(tmp_path) -> None:
    model, other = made(DiLoCo(period=4)), made(DiLoCo(period=4))
    fit(model)
    path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "step"))
    other.optimizer.build(other.trainable_variables)
    sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    for one in (model, other):
        fit(one)
    np.testing.assert_allclose(weights_of(other), weights_of(model), atol=1e-6)


@pytest.mark.parametrize("method", [LocalSGD(period=2), DiLoCo(period=2)], ids=repr)
def test_a_round_counts_updates_and_not_the_batches_of_each(method) -> None:
    accumulating = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    model = made(method, optimizer=accumulating)
    start = model.get_weights()
    # 6 batches are 3 updates: the third one is in the second round.
    for epochs, more in ((1, 1), (3, 2)):
        fit(model, epochs=more, num=72)
        whole, _, _ = trained(start, method, 3, 1, epochs=epochs, num=72, per_update=2)
        for one, other in zip(model.get_weights(), whole, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert int(accumulating.iterations) == 9


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_second_compile_saves_the_local_copies_too(kind, tmp_path) -> None:
    model = made(kind(period=3))
    fit(model, epochs=1)
    copies = [np.asarray(one.local_copy.storage) for one in model.trainable_variables]
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    for one, before in zip(model.trainable_variables, copies, strict=True):
        np.testing.assert_array_equal(one.local_copy.storage, before)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "step"))
    other = made(kind(period=3), optimizer="adam")
    other.optimizer.build(other.trainable_variables)
    sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    with warnings.catch_warnings(), strategy_of(kind(period=3)).scope():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one in (loaded, other):
        paths = {variable.path for variable in one.optimizer.variables}
        assert len(paths) == len(model.optimizer.variables)
        for a, b in zip(one.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_allclose(np.asarray(a.value), np.asarray(b.value), rtol=1e-6)


def test_file_of_training_without_local_copies_is_read(tmp_path) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    rule = QuadraticPeriod(base=2, growth=0.1)
    with warnings.catch_warnings(), strategy_of(DiLoCo(period=rule)).scope():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 8
    for one in loaded.trainable_variables:
        np.testing.assert_array_equal(one.local_copy.storage, np.stack([one.value] * 3))
    fit(loaded)


def test_loss_scale_and_stateless_updates_are_refused() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(NotImplementedError, match="LossScaleOptimizer was applied under"):
        fit(made(LocalSGD(), optimizer=scaled))
    model = made(LocalSGD())
    optimizer, variables = model.optimizer, model.trainable_variables

    def step():
        values = [one.value for one in variables]
        state = [one.value for one in optimizer.variables]
        optimizer.stateless_apply(state, values, values)

    with pytest.raises(NotImplementedError, match="stateless_apply was called under"):
        variables[0].distribute_strategy.run(step)


# Rounds whose length follows the learning rate, against the paper's rule in plain Python.

X_OF_ROUNDS, Y_OF_ROUNDS = np.resize(X, (160, 4)), np.resize(Y, (160, 1))
BATCH_OF_ROUNDS = 4
STEPS = len(X_OF_ROUNDS) // BATCH_OF_ROUNDS


def made_for_rounds(method, rate, *, count=2, **arguments: Any):
    return made(method, optimizer=keras.optimizers.SGD(rate), count=count, **arguments)


class SyncedSteps(keras.callbacks.Callback):
    """Records the steps after which the global model is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.before: Any = None

    def on_train_begin(self, logs=None):
        self.before = self.model.get_weights()[0]

    def on_train_batch_end(self, batch, logs=None):
        now = self.model.get_weights()[0]
        if np.any(now != self.before):
            self.steps.append(int(self.model.optimizer.iterations))
        self.before = now


def synced_steps(model, first=0, last=STEPS, **arguments: Any):
    synced = SyncedSteps()
    rows = slice(first * BATCH_OF_ROUNDS, last * BATCH_OF_ROUNDS)
    callbacks = [synced, *arguments.pop("callbacks", [])]
    arguments = {"batch_size": BATCH_OF_ROUNDS, "shuffle": False, "verbose": 0, **arguments}
    model.fit(X_OF_ROUNDS[rows], Y_OF_ROUNDS[rows], callbacks=callbacks, **arguments)
    return synced.steps


def by_rule(rule, rate_of, steps, warmup_steps=0):
    """Returns the steps that end a round of the paper's rule: rates are those of its first step."""
    ends, start = [], 0
    while start < steps:
        length = max(rule.base, math.floor((rule.growth / rate_of(start)) ** 2 + 1e-4))
        end = start + (1 if start < warmup_steps else length)
        if rule.total_steps is not None and start < rule.total_steps:
            end = min(end, rule.total_steps)
        ends.append(end)
        start = end
    return [end for end in ends if end <= steps]


def stepped(step):
    """A piecewise rate: quotients with the growth 0.1 are 1, 2, 2.5 and 4."""
    return 0.1 if step < 8 else 0.05 if step < 16 else 0.04 if step < 24 else 0.025


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([7, 15, 23], [0.1, 0.05, 0.04, 0.025])


@pytest.mark.parametrize(
    ("kind", "rule", "warmup_steps"),
    [
        (DiLoCo, QuadraticPeriod(base=3, growth=0.1), 4),
        (LocalSGD, QuadraticPeriod(base=3, growth=0.1, total_steps=35), 0),
    ],
    ids=str,
)
def test_rounds_are_those_of_the_rule(kind, rule, warmup_steps) -> None:
    method = kind(period=rule, warmup_steps=warmup_steps)
    model = made_for_rounds(method, schedule(), count=4, size=2)
    assert synced_steps(model) == by_rule(rule, stepped, STEPS, warmup_steps)


def test_rate_that_a_callback_sets_counts_from_the_next_round() -> None:
    def rate(epoch):
        return 0.1 if epoch == 0 else 0.05

    model = made_for_rounds(LocalSGD(period=QuadraticPeriod(base=3, growth=0.15)), 0.1)
    setter = keras.callbacks.LearningRateScheduler(lambda epoch, _: rate(epoch))
    found = synced_steps(model, last=10, epochs=2, callbacks=[setter])
    # The rate changes after step 10, in a round of three steps that began at step 9.
    assert found == [3, 6, 9, 12]


@pytest.mark.parametrize(("total_steps", "expected"), [(20, [20]), (None, [])])
def test_round_that_begins_with_a_rate_of_zero_ends_with_training(total_steps, expected) -> None:
    rule = QuadraticPeriod(base=4, growth=0.1, total_steps=total_steps)
    model = made_for_rounds(LocalSGD(period=rule), 0.0)
    setter = keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.1 * epoch)
    assert synced_steps(model, last=10, epochs=2, callbacks=[setter]) == expected


@pytest.mark.slow
def test_round_goes_on_from_a_file(tmp_path) -> None:
    """A file of the middle of a round has its end."""
    rule = QuadraticPeriod(base=2, growth=0.1)
    whole = made_for_rounds(LocalSGD(period=rule), schedule())
    expected = synced_steps(whole)
    model = made_for_rounds(LocalSGD(period=rule), schedule())
    first = synced_steps(model, last=17)  # in the round from 16 to 22
    model.save(tmp_path / "model.keras")
    other = made_for_rounds(LocalSGD(period=rule), schedule())
    other.optimizer.build(other.trainable_variables)
    path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "step"))
    sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    with strategy_of(LocalSGD(period=rule), 2).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one in (other, loaded):
        assert [*first, *synced_steps(one, first=17)] == expected

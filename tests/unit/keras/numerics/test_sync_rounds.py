"""Rounds whose length follows the learning rate, against the paper's rule in plain Python."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import DiLoCo, LocalSGD, QuadraticPeriod

RNG = np.random.default_rng(2)
X = RNG.normal(size=(160, 4)).astype("float32")
Y = (X @ [1.0, -2.0, 0.5, 3.0] + 0.1 * RNG.normal(size=160)).astype("float32")[:, None]
BATCH = 4
STEPS = len(X) // BATCH


def made(method, rate, *, count=2, size=1, optimizer=None, **arguments: Any):
    keras.utils.set_random_seed(0)
    devices = [f"cpu:{index}" for index in range(count)]
    with sg.LocalUpdateStrategy(method, devices, replicas_per_island=size).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(rate) if optimizer is None else optimizer
        model.compile(optimizer, "mse", **arguments)
    return model


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
    rows = slice(first * BATCH, last * BATCH)
    callbacks = [synced, *arguments.pop("callbacks", [])]
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    model.fit(X[rows], Y[rows], callbacks=callbacks, **arguments)
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
    ("rule", "warmup_steps", "expected"),
    [
        (QuadraticPeriod(base=1, growth=0.1), 0, [*range(1, 9), 12, 16, 22, 28]),
        (QuadraticPeriod(base=3, growth=0.1), 0, [3, 6, 9, 13, 17, 23, 29]),
        (QuadraticPeriod(base=3, growth=0.1), 4, [1, 2, 3, 4, 7, 10, 14, 18, 24, 40]),
        (QuadraticPeriod(base=3, growth=0.1, total_steps=35), 0, [3, 6, 9, 13, 17, 23, 29, 35]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_rounds_are_those_of_the_rule(kind, rule, warmup_steps, expected) -> None:
    assert by_rule(rule, stepped, STEPS, warmup_steps) == expected
    model = made(kind(period=rule, warmup_steps=warmup_steps), schedule())
    assert synced_steps(model) == expected


def test_rounds_between_islands_and_in_calls_of_several_steps() -> None:
    rule = QuadraticPeriod(base=2, growth=0.1, total_steps=STEPS)
    model = made(LocalSGD(period=rule), schedule(), count=4, size=2, steps_per_execution=4)
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    x, y = (one.astype(np.float64) for one in (X, Y))
    start = made(LocalSGD(period=rule), schedule(), count=4, size=2).get_weights()
    whole = [one.astype(np.float64) for one in start]
    own, ends = [whole, whole], by_rule(rule, stepped, STEPS)
    for step in range(STEPS):
        for island in range(2):
            rows = slice(step * BATCH + 2 * island, step * BATCH + 2 * island + 2)
            error = 2 * (x[rows] @ own[island][0] + own[island][1] - y[rows]) / 2
            grads = [x[rows].T @ error, error.sum(0)]
            own[island] = [a - stepped(step) * b for a, b in zip(own[island], grads, strict=True)]
        if step + 1 in ends:
            whole = [(a + b) / 2 for a, b in zip(*own, strict=True)]
            own = [whole, whole]
    for found, wanted in zip(model.get_weights(), whole, strict=True):
        np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_rate_that_a_callback_sets_counts_from_the_next_round() -> None:
    def rate(epoch):
        return 0.1 if epoch == 0 else 0.05

    model = made(LocalSGD(period=QuadraticPeriod(base=3, growth=0.15)), 0.1)
    setter = keras.callbacks.LearningRateScheduler(lambda epoch, _: rate(epoch))
    found = synced_steps(model, last=10, epochs=2, callbacks=[setter])
    # The rate changes after step 10, in a round of three steps that began at step 9.
    assert found == [3, 6, 9, 12]


@pytest.mark.parametrize(("total_steps", "expected"), [(20, [20]), (None, [])])
def test_round_that_begins_with_a_rate_of_zero_ends_with_training(total_steps, expected) -> None:
    rule = QuadraticPeriod(base=4, growth=0.1, total_steps=total_steps)
    model = made(LocalSGD(period=rule), 0.0)
    setter = keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.1 * epoch)
    assert synced_steps(model, last=10, epochs=2, callbacks=[setter]) == expected


@pytest.mark.slow
def test_round_goes_on_from_a_file(tmp_path) -> None:
    """A file of the middle of a round has its end."""
    rule = QuadraticPeriod(base=2, growth=0.1)
    whole = made(LocalSGD(period=rule), schedule())
    expected = synced_steps(whole)
    model = made(LocalSGD(period=rule), schedule())
    first = synced_steps(model, last=17)  # in the round from 16 to 22
    model.save(tmp_path / "model.keras")
    other = made(LocalSGD(period=rule), schedule())
    other.optimizer.build(other.trainable_variables)
    path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "step"))
    sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    with sg.LocalUpdateStrategy(LocalSGD(period=rule), ["cpu:0", "cpu:1"]).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one in (other, loaded):
        assert [*first, *synced_steps(one, first=17)] == expected


def test_rounds_of_a_loop_of_ones_own() -> None:
    rule = QuadraticPeriod(base=3, growth=0.1)
    model = made(LocalSGD(period=rule), schedule())
    strategy = model.weights[0].distribute_strategy
    loss = keras.losses.MeanSquaredError(reduction=None)

    def step(batch):
        x, y = batch

        def value():
            return sg.compute_average_loss(loss(y, model(x)))

        _, grads = sg.value_and_grad(value, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)

    found, before = [], model.get_weights()[0]
    dataset = sg.input.Dataset((X, Y), batch_size=BATCH)
    for number, batch in enumerate(strategy.distribute_dataset(dataset), start=1):
        strategy.run(step, args=(batch,))
        now = model.get_weights()[0]
        if np.any(now != before):
            found.append(number)
        before = now
    assert found == by_rule(rule, stepped, STEPS)

"""`fit` with local updates over parameter servers, beside lockstep and one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.parameter_server.local_models import (
    FIT,
    IDS,
    LastingCluster,
    X,
    Y,
    apart_in_lockstep,
    assert_same,
    dense,
    independent,
    mode_of,
    table,
    training_apart,
    weights,
)

METHODS = {
    "local": sg.local_updates.LocalSGD(period=2),
    "DiLoCo": sg.local_updates.DiLoCo(period=4, warmup_steps=2),
}


def clipped() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "steps_per_call"), [("local", 1), ("DiLoCo", 2)])
def test_synchronous_workers_equal_replicas_in_lockstep(method: str, steps_per_call: int) -> None:
    with apart_in_lockstep(METHODS[method]).scope():
        expected = dense(clipped())
    known = expected.fit(X, Y, validation_data=(X, Y), **FIT).history
    with training_apart(METHODS[method], 2, synchronous=True) as strategy:
        with strategy.scope():
            model = dense(clipped(), steps_per_execution=steps_per_call)
        history = model.fit(X, Y, validation_data=(X, Y), **FIT).history
        for name, values in known.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
        assert_same(model.variables, expected.variables)
        assert int(model.optimizer.iterations) == 2 * 8
        client = strategy.placement.remote.variables.client
        num_rounds = {"local": 8, "DiLoCo": 2 + 4}[method]
        # Both workers, two servers; none of their changes came too late.
        assert sum(client.staleness().values()) == 2 * 2 * num_rounds
        assert client.discarded() == 0


@pytest.mark.slow
def test_synchronous_workers_with_data_of_their_own_equal_replicas_in_lockstep() -> None:
    method = METHODS["local"]

    def own_part(context: sg.InputContext) -> Any:
        first = 4 * context.input_pipeline_id
        return [(X[at + first :][:4], Y[at + first :][:4]) for at in range(0, 64, 8)]

    with apart_in_lockstep(method).scope():
        expected = dense(clipped())
    expected.fit(X, Y, **FIT)
    with training_apart(method, 2, synchronous=True) as strategy:
        with strategy.scope():
            model = dense(clipped())
        model.fit(sg.DatasetCreator(own_part), epochs=2, verbose=0)
        assert_same(model.variables, expected.variables)


def test_one_worker_trains_as_one_device_does() -> None:
    def made() -> keras.Model:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.8)
        optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.1)
        model = dense(optimizer)
        model.get_layer("out").trainable = False
        model.compile(optimizer, "mse")
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return model

    alone = made()
    alone.fit(X, Y, **FIT)
    method = sg.local_updates.LocalSGD(period=3)
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with training_apart(method, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            model = made()
        model.fit(X, Y, **FIT)
        assert_same(model.variables, alone.variables)
        # At the end of an epoch the servers get the worker's state of the optimizer.
        assert_same(model.optimizer.variables, alone.optimizer.variables)
        np.testing.assert_allclose(
            model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-5
        )


@pytest.mark.slow
def test_learning_rate_of_a_callback_counts_from_the_next_round() -> None:
    def rate_of(epoch: int, rate: float) -> float:
        del epoch
        return rate / 4

    alone = dense(keras.optimizers.SGD(0.2))
    alone.fit(X, Y, callbacks=[keras.callbacks.LearningRateScheduler(rate_of)], **FIT)
    with training_apart(sg.local_updates.LocalSGD(period=5)) as strategy:
        with strategy.scope():
            model = dense(keras.optimizers.SGD(0.2))
        model.fit(X, Y, callbacks=[keras.callbacks.LearningRateScheduler(rate_of)], **FIT)
        assert_same(model.variables, alone.variables)
        with strategy.scope():  # the servers drop the former one
            model.compile(keras.optimizers.Adam(0.01), "mse")
        alone.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(X, Y, **FIT)
        alone.fit(X, Y, **FIT)
        assert_same(model.variables, alone.variables)


@pytest.mark.slow
def test_rows_of_tables_are_sent_in_each_step() -> None:
    alone = table(keras.optimizers.Adagrad(0.1))
    alone.fit(IDS, Y, **FIT)
    with training_apart(sg.local_updates.LocalSGD(period=100)) as strategy:
        with strategy.scope():
            model = table(keras.optimizers.Adagrad(0.1))
        model.fit(IDS, Y, **FIT)
        assert_same(model.variables, alone.variables)
        client = strategy.placement.remote.variables.client
        counts = sorted(state["updates"]["applied"]["push"] for state in client.describe().values())
        assert sum(counts) >= 2 * 8 + 2  # rows in each step, other weights once in each epoch


@pytest.mark.slow
def test_workers_share_what_they_learn_at_the_end_of_an_epoch() -> None:
    seen: list[float] = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(float(np.abs(weights(model)[0] - start).max()))

    with training_apart(sg.local_updates.DiLoCo(period=1000), 2) as strategy:
        with strategy.scope():
            model = dense(keras.optimizers.SGD(0.05))
        start = weights(model)[0]
        loss = model.evaluate(X, Y, verbose=0)[0]
        history = model.fit(X, Y, validation_data=(X, Y), callbacks=[Reader()], **FIT).history
        assert history["val_loss"][0] < loss
        assert seen[0] > 0
        assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(history["val_loss"][-1])


@pytest.mark.slow
def test_independent_workers_train_apart() -> None:
    cluster = LastingCluster()
    mode = mode_of(sg.local_updates.LocalSGD(period=3), 1)
    alone = dense(keras.optimizers.Adam(0.01))
    known = alone.fit(X, Y, validation_data=(X, Y), **FIT).history
    with independent(cluster, 0, mode) as strategy:
        with strategy.scope():
            model = dense(keras.optimizers.Adam(0.01))
        history = model.fit(X, Y, validation_data=(X, Y), **FIT).history
        np.testing.assert_allclose(history["val_loss"], known["val_loss"], rtol=1e-4)
        assert_same(model.variables, alone.variables, rtol=1e-4)
        assert_same(model.optimizer.variables, alone.optimizer.variables, rtol=1e-4)
    cluster.end()

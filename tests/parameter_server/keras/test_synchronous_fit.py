"""Synchronous updates: workers that share batches, beside one device and mirrored replicas."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.parameter_server.keras.fit import shares_of
from stratagem.parameter_server.server.updates import UpdateMode
from tests.parameter_server.clusters import local_strategy
from tests.parameter_server.shared_with_workers import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(1)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = RNG.normal(size=(50, 2)).astype("float32")
IDS = RNG.integers(0, 9000, (50, 3))


def dense(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Input((6,)), keras.layers.Dense(8, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(2, kernel_regularizer="l2")])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def table(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(9000, 8)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"], **options)
    return model


def synchronous(num_workers: int, *, backup_workers: int = 0) -> Any:
    return local_strategy(num_workers, mode=UpdateMode(num_workers - backup_workers))


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=["one", "two"])
def test_four_workers_equal_four_mirrored_replicas(options: dict[str, Any]) -> None:
    fitted: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]).scope():
        mirrored = dense()
    expected = mirrored.fit(X, Y, **fitted)
    with synchronous(4) as strategy:
        with strategy.scope():
            model = dense(**options)
        history = model.fit(X, Y, **fitted)
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
        for one, two in zip(model.variables, mirrored.variables, strict=True):
            np.testing.assert_allclose(one.value, two.value, rtol=1e-5, atol=1e-6)
        assert int(model.optimizer.iterations) == 2 * 4
        assert strategy.placement.remote.variables.client.discarded() == 0


def test_rows_of_tables_are_added_up() -> None:
    # The optimizer of a row that nobody looks up stands still: compared with one worker.
    fitted: dict[str, Any] = {"batch_size": 10, "shuffle": False, "verbose": 0}
    trained = []
    for num_workers in (1, 3):
        with synchronous(num_workers) as strategy:
            with strategy.scope():
                model = table()
            model.fit(IDS, Y, **fitted)
            trained.append([np.asarray(one.value) for one in model.variables])
    for one, three in zip(*trained, strict=True):
        np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-6)


def test_more_workers_than_rows_are_waited_for() -> None:
    alone = dense()
    alone.fit(X[:2], Y[:2], shuffle=False, verbose=0)
    with synchronous(3) as strategy:
        with strategy.scope():
            model = dense()
        history = model.fit(X[:2], Y[:2], shuffle=False, verbose=0)
        assert len(history.history["mae"]) == 1
        for one, two in zip(model.variables, alone.variables, strict=True):
            np.testing.assert_allclose(one.value, two.value, rtol=1e-5, atol=1e-6)


def test_backup_workers_are_not_waited_for() -> None:
    with synchronous(3, backup_workers=1) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(X, Y, batch_size=12, epochs=3, verbose=0)
        client = strategy.placement.remote.variables.client
        # Every push is part of an update or told to be late; none waits for ever.
        assert all(told["num_waiting"] == 0 for told in client.describe().values())
        counted = sum(client.staleness().values()) + client.discarded()
        assert counted == 2 * 5 * 3 * 2  # two parts of each batch, to two servers
        assert int(model.optimizer.iterations) <= 5 * 3


def test_clipping_is_refused() -> None:
    with synchronous(2) as strategy:
        with strategy.scope():
            model = dense()
            model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
        with pytest.raises(NotImplementedError, match="clips gradients, but servers sum"):
            model.fit(X, Y, verbose=0)


def test_shares_are_all_of_a_batch() -> None:
    batch = (np.arange(7), None)
    shares = shares_of(batch, 3)
    assert [part[0].tolist() for part, _ in shares] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [weight for _, weight in shares] == [3 / 7, 2 / 7, 2 / 7]
    assert [weight for _, weight in shares_of(batch, 9)][-2:] == [0.0, 0.0]


def test_steps_that_took_too_long_are_run_again() -> None:
    bounded = UpdateMode(max_staleness=0)
    with local_strategy(3, num_servers=1, mode=bounded) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(X, Y, batch_size=5, epochs=3, verbose=0)
        client = strategy.placement.remote.variables.client
        assert client.staleness() == {0: 30}
        assert int(model.optimizer.iterations) == 30
        history = model.fit(X, Y, batch_size=5, epochs=1, verbose=0)
        # Each example was counted once, however often its step was run.
        alone = dense()
        alone.set_weights(model.get_weights())
        assert model.evaluate(X, Y, verbose=0)[0] <= history.history["loss"][0]
        np.testing.assert_allclose(
            model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-5
        )


def test_batches_are_shared_by_those_that_were_not_given_up() -> None:
    fitted: dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
    alone = dense()
    alone.fit(X, Y, epochs=2, **fitted)
    with synchronous(3) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(X, Y, **fitted)
        workers = strategy.executor.coordinator.workers
        workers.on_lost(1, "it died")
        workers.on_given_up(1, UnavailableError("no more restarts"))
        limit_s = time.monotonic() + LIMIT_S
        while strategy.placement.remote.variables.mode.num_needed != 2:
            assert time.monotonic() < limit_s
        model.fit(X, Y, **fitted)
        for one, two in zip(model.variables, alone.variables, strict=True):
            np.testing.assert_allclose(one.value, two.value, rtol=1e-5, atol=1e-6)
        assert strategy.executor.coordinator.stalls.num_stalls == 0

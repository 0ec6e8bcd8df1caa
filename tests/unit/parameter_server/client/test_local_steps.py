"""Steps on a worker's own weights: which steps use them, and which values stay on servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.strategies.base.self_description import transfers_of
from tests.unit.parameter_server.local_models import (
    IDS,
    LastingCluster,
    X,
    Y,
    counting_messages,
    dense,
    independent,
    mode_of,
    table,
)

METHOD = sg.local_updates.LocalSGD(period=4)


@pytest.fixture
def strategy() -> Iterator[Any]:
    cluster = LastingCluster(num_servers=1)
    with independent(cluster, 0, mode_of(METHOD, 1)) as made:
        yield made
    cluster.end()


def test_steps_that_do_not_train_use_the_global_model(strategy) -> None:
    with strategy.scope():
        variable = sg.Variable(np.float32([2.0]))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def train() -> Any:
        before = variable.value
        optimizer.apply([jnp.ones(1)], [variable])
        return before

    def read() -> Any:
        return variable.value * 1

    seen = [float(strategy.run(step)[0]) for step in (train, train, read, train, train, read)]
    assert seen == [2, 1, 2, 0, -1, -2]


@pytest.mark.slow
def test_only_rows_of_tables_are_sent_in_a_step(strategy, monkeypatch) -> None:
    with strategy.scope():
        model = table(keras.optimizers.SGD(0.1))
    model.train_on_batch(IDS[:8], Y[:8])
    with counting_messages(monkeypatch) as kinds:
        model.train_on_batch(IDS[8:16], Y[8:16])
    assert kinds == ["pull_rows", "push"]
    client = strategy.placement.remote.variables.client
    rows = client.pull_rows(model.get_layer("table").embeddings.place.name, IDS[8:16])
    alone = table(keras.optimizers.SGD(0.1))
    alone.train_on_batch(IDS[:8], Y[:8])
    alone.train_on_batch(IDS[8:16], Y[8:16])
    expected = np.asarray(alone.get_layer("table").embeddings.value)[IDS[8:16]]
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_single_batches_train_in_rounds(strategy, monkeypatch) -> None:
    alone = dense(keras.optimizers.Adam(0.01))
    with strategy.scope():
        model = dense(keras.optimizers.Adam(0.01))
    losses: list[Any] = []
    for number in range(4):
        batch = slice(8 * number, 8 * number + 8)
        losses.append(model.train_on_batch(X[batch], Y[batch], return_dict=True)["loss"])
        known = alone.train_on_batch(X[batch], Y[batch], return_dict=True)["loss"]
        np.testing.assert_allclose(losses[-1], known, rtol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-4
    )


def test_changes_are_described_as_sent_once_in_a_period(strategy) -> None:
    with strategy.scope():
        model = table(keras.optimizers.SGD(0.1))
    found = transfers_of(
        model.variables,
        strategy.placement,
        strategy.topology,
        has_slots=True,
        local_updates=METHOD,
    )
    size = sum(np.asarray(one.value).nbytes for one in model.variables[1:])
    assert {(one.kind, one.arrays): (one.sent_bytes, one.every_steps) for one in found} == {
        ("pull from servers", "rows looked up"): (None, 1),
        ("push to servers", "gradients of rows"): (None, 1),
        ("pull from servers", "values"): (0, 4),
        ("push to servers", "changes of weights"): (size // 4, 4),
    }

"""One problem for libraries of plain JAX, trained on one device and under a strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stratagem as sg

NUM_FEATURES = 3
_NUM_EPOCHS = 2
# The last batch has a single row, which leaves the other replicas without any.
_BATCH_SIZE = 4
_NUM_ROWS = 17


@dataclasses.dataclass(frozen=True)
class Reductions:
    """What a step does differently in a replica: everything else is the same code.

    Args:
        mean: of one number an example; in a replica, its share of the mean of the whole batch.
        total: of the shares of all replicas, for a pytree.
    """

    mean: Callable[[jax.Array], jax.Array]
    total: Callable[[Any], Any]


ONE_DEVICE = Reductions(jnp.mean, lambda values: values)
REPLICAS = Reductions(
    sg.compute_average_loss,
    lambda values: sg.get_replica_context().all_reduce("SUM", values),
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses, predictions, and the state of each replica."""

    losses: list[float]
    predictions: np.ndarray
    states: list[Any]


# step(reductions, state, x, y) returns (state, loss); predict(state, x) returns an array.
Step = Callable[[Reductions, Any, Any, Any], tuple[Any, Any]]
Predict = Callable[[Any, Any], Any]


def _examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(15)
    x = random.standard_normal((_NUM_ROWS, NUM_FEATURES)).astype("float32")
    return x, np.sin(x.sum(axis=1)).astype("float32")


def _on_one_device(step: Step, predict: Predict, state: Any) -> Trained:
    """A loop in plain JAX, in which nothing of Stratagem takes part."""
    x, y = _examples()
    train = jax.jit(functools.partial(step, ONE_DEVICE))
    losses = []
    for _ in range(_NUM_EPOCHS):
        for start in range(0, _NUM_ROWS, _BATCH_SIZE):
            rows = slice(start, start + _BATCH_SIZE)
            state, loss = train(state, x[rows], y[rows])
            losses.append(float(loss))
    return Trained(losses, np.asarray(predict(state, x)), [state])


def _on_replicas(strategy: Any, step: Step, predict: Predict, state: Any) -> Trained:
    x, y = _examples()
    dataset = strategy.distribute_dataset(sg.input.Dataset((x, y), batch_size=_BATCH_SIZE))
    train = functools.partial(step, REPLICAS)
    losses, predictions = [], []
    for _ in range(_NUM_EPOCHS):
        for rows, targets in dataset:
            state, loss = strategy.run(train, args=(state, rows, targets))
            losses.append(float(strategy.reduce("MEAN", loss, axis=None)))
    for rows, _ in dataset:
        predictions.append(strategy.gather(strategy.run(predict, args=(state, rows)), axis=0))
    return Trained(losses, np.concatenate(predictions), strategy.local_results(state))


def assert_like_plain_jax(
    strategy: Any, step: Step, predict: Predict, state: Any, tolerance: float = 1e-5
) -> Trained:
    """Trains on one device and under a strategy; each replica must come out the same.

    Returns:
        What was trained on one device.
    """
    expected = _on_one_device(step, predict, state)
    trained = _on_replicas(strategy, step, predict, state)
    near = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    near(trained.losses, expected.losses)
    near(trained.predictions, expected.predictions)
    assert len(trained.states) == strategy.num_replicas_in_sync
    for one in trained.states:
        jax.tree.map(
            lambda got, wanted: near(_numbers(got), _numbers(wanted)), one, expected.states[0]
        )
    assert expected.losses[-1] != expected.losses[0]
    return expected


def _numbers(leaf: Any) -> np.ndarray:
    """A leaf as numbers; random keys as their data."""
    if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)

"""Stateful RNNs under a strategy keep the state of the global batch from one batch to the next.

Plain Keras loses it in `fit` on JAX, so that its layers of no state are called with the states.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
import pytest

from stratagem.keras.numerics.stateful_rnn import check_batch_size
from tests.parity.comparison import mirrored, with_known_weights

_X = np.random.RandomState(0).standard_normal((10, 3, 2)).astype("float32")
_Y = np.ones((10, 2), "float32")
_RATE = 0.1


def _stateful(make: Any, *, run_eagerly: bool) -> Any:
    layers = [keras.Input(batch_shape=(5, 3, 2)), make(2, stateful=True)]
    model = with_known_weights(keras.Sequential(layers))
    model.compile(optimizer=keras.optimizers.SGD(_RATE), loss="mse", run_eagerly=run_eagerly)
    return model


def _by_hand(make: Any) -> tuple[list[float], list[Any], list[Any]]:
    """The losses of an epoch of two batches, the weights and the states after it."""
    layer = make(2, return_state=True)
    layer.build((5, 3, 2))
    with_known_weights(layer)
    weights = [variable.value for variable in layer.trainable_variables]
    rest = [variable.value for variable in layer.non_trainable_variables]
    states = [np.zeros((5, 2), "float32")] * (2 if make is keras.layers.LSTM else 1)

    def loss_of(weights: Any, states: Any, x: Any, y: Any) -> Any:
        (outputs, *new), _ = layer.stateless_call(weights, rest, x, initial_state=states)
        return keras.ops.mean((outputs - y) ** 2), new

    losses = []
    for x, y in zip(np.split(_X, 2), np.split(_Y, 2), strict=True):
        (loss, states), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, states, x, y)
        weights = [weight - _RATE * grad for weight, grad in zip(weights, grads, strict=True)]
        losses.append(float(loss))
    return losses, weights, states


@pytest.mark.parametrize(
    ("make", "num_replicas", "run_eagerly"),
    [
        (keras.layers.LSTM, 2, False),
        pytest.param(keras.layers.GRU, 2, True, marks=pytest.mark.slow),
        pytest.param(keras.layers.GRU, 1, False, marks=pytest.mark.slow),
        pytest.param(keras.layers.LSTM, 3, True, marks=pytest.mark.slow),
    ],
)
def test_state_of_a_batch_goes_on_in_the_next(make, num_replicas, run_eagerly) -> None:
    losses, weights, states = _by_hand(make)
    with mirrored(num_replicas).scope():
        model = _stateful(make, run_eagerly=run_eagerly)
    history = model.fit(_X, _Y, batch_size=5, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [np.mean(losses)], rtol=1e-5)
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(variable.value, value, rtol=1e-5, atol=1e-6)
    for variable, value in zip(keras.tree.flatten(model.layers[0].states), states, strict=True):
        np.testing.assert_allclose(variable.value, value, rtol=1e-5, atol=1e-6)
    model.layers[0].reset_state()
    assert not np.any(keras.tree.flatten(model.layers[0].states)[0].value)


def test_batch_of_another_size_is_refused() -> None:
    with mirrored(2).scope():
        model = _stateful(keras.layers.LSTM, run_eagerly=False)
    strategy = model.distribute_strategy
    parts = strategy.distribute_values_from_function(lambda context: _X[:2])
    with pytest.raises(ValueError, match=r"'lstm.*' has state for 5 examples.*passed it 4 in 2"):
        strategy.run(model, args=(parts,))


def test_workers_with_batches_of_their_own_are_refused() -> None:
    model = _stateful(keras.layers.LSTM, run_eagerly=False)
    strategy = SimpleNamespace(placement=SimpleNamespace(is_remote=True))
    context = SimpleNamespace(strategy=strategy, global_num_examples=5, num_replicas_in_sync=1)
    with pytest.raises(
        ValueError, match=r"(?s)cannot run the stateful RNN.*Fix: remove stateful=True"
    ):
        check_batch_size(model.layers[0], _X[:5], context)

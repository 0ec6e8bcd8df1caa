"""What follows an error, or an end that came too early, in fit and evaluate on workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from tests.parameter_server.clusters import local_strategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

X = np.random.default_rng(0).normal(size=(120, 3)).astype("float32")
Y = X[:, :1]
_LIMIT_S = 60.0
_is_held = threading.Event()
_held_up = threading.Event()


class Holding(keras.layers.Layer):
    """Waits for the test where batches have five rows, and fails on those of four."""

    def call(self, x: Any) -> Any:
        if sg.get_strategy().executor.schedules:  # where Keras only looks at the shapes
            return x
        if x.shape[0] == 4:
            raise ArithmeticError("four rows")
        if x.shape[0] == 5:
            _held_up.set()
            assert _is_held.wait(_LIMIT_S)
        return x


@pytest.fixture
def strategy() -> Iterator[RemoteStateStrategy]:
    with local_strategy(num_workers=2) as made:
        yield made


def make(strategy: RemoteStateStrategy) -> Any:
    with strategy.scope():
        layers = [keras.layers.Input((3,)), Holding(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.compatibility
@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict"])
def test_error_in_long_data_is_raised_once(strategy, kind) -> None:
    model = make(strategy)
    calls = {
        "fit": lambda size: model.fit(X, Y, batch_size=size, verbose=0),
        "evaluate": lambda size: model.evaluate(X, Y, batch_size=size, verbose=0),
        "predict": lambda size: model.predict(X, batch_size=size, verbose=0),
    }
    with pytest.raises(ArithmeticError, match="four rows"):
        calls[kind](4)
    calls[kind](6)
    assert strategy.executor.coordinator.done()
    np.testing.assert_allclose(
        model.predict(X, batch_size=6, verbose=0),
        X @ model.layers[-1].kernel.numpy() + model.layers[-1].bias.numpy(),
        rtol=1e-4,
        atol=1e-5,
    )


def test_what_an_interrupted_epoch_has_left_counts_in_no_other(strategy) -> None:
    model = make(strategy)
    _is_held.clear()

    class Interrupting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ConnectionAbortedError("by hand")

    with pytest.raises(ConnectionAbortedError, match="by hand"):
        model.fit(X, Y, batch_size=5, verbose=0, callbacks=[Interrupting()])
    assert _held_up.wait(_LIMIT_S)
    # It goes on while the next call has begun.
    threading.Timer(0.2, _is_held.set).start()
    evaluated = model.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)
    predicted = model.predict(X, batch_size=6, verbose=0)
    assert evaluated["mae"] == pytest.approx(np.abs(predicted - Y).mean(), rel=1e-4)

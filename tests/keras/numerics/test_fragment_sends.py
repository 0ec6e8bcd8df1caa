"""Sends beside the steps: the same numbers as those of sends in a step's program."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.numerics import fragment_sends
from stratagem.local_updates import StreamingDiLoCo

RNG = np.random.default_rng(5)
X = RNG.normal(size=(92, 4)).astype("float32")
Y = RNG.normal(size=(92, 40)).astype("float32")
BATCH = 12  # 8 steps an epoch


@pytest.fixture(params=[False, True], ids=["in the step", "beside"])
def is_beside(request, monkeypatch):
    monkeypatch.setattr(fragment_sends, "runs_beside", lambda strategy: request.param)
    return request.param


class Ways:
    """Trains with sends in the step and beside it."""

    def __init__(self, monkeypatch) -> None:
        self._monkeypatch = monkeypatch

    def both(self, train):
        found = []
        for is_beside in (False, True):
            self._monkeypatch.setattr(
                fragment_sends, "runs_beside", lambda strategy, flag=is_beside: flag
            )
            found.append(train())
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


@pytest.mark.parametrize(
    ("method", "count", "size"),
    [
        (StreamingDiLoCo(period=4, fragments=2, overlap=2), 2, 1),
        (StreamingDiLoCo(period=6, fragments=2, overlap=5, warmup_steps=3), 3, 1),
        (StreamingDiLoCo(period=5, fragments=1, overlap=1, own_share=0.0), 2, 1),
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

"""Optimizer state apart from its variables: where it is stored, and the numbers of one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

TWO = ["cpu:0", "cpu:1"]
STATE = sg.placement.optimizer_state
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 64)).astype("float32")
IDS = RNG.integers(0, 8192, (22,), dtype="int32")
Y = RNG.normal(size=(22, 3)).astype("float32")


def made(strategy: sg.Strategy | None, optimizer: Any, steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    with (strategy or sg.get_strategy()).scope():
        features, item = keras.Input((64,)), keras.Input((), dtype="int32")
        hidden = [features, keras.layers.Embedding(8192, 8, name="items")(item)]
        hidden = keras.layers.Concatenate()(hidden)
        hidden = keras.layers.Dense(64, activation="relu", name="wide")(hidden)
        model = keras.Model([features, item], keras.layers.Dense(3, name="top")(hidden))
        model.compile(optimizer(), "mse", steps_per_execution=steps)
    return model


def fitted(model: keras.Model) -> list[np.ndarray]:
    model.fit([X, IDS], Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [np.asarray(one.value) for one in [*model.variables, *model.optimizer.variables]]


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def adagrad() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.1)


CASES = [
    ({STATE: "pinned_host"}, adam, 1),
    pytest.param({STATE: "pinned_host", "items": "sharded"}, adagrad, 1, marks=pytest.mark.slow),
    pytest.param({STATE: "pinned_host", "": "sharded"}, adam, 3, marks=pytest.mark.slow),
    pytest.param({STATE: "sharded", "wide": "pinned_host"}, adam, 1, marks=pytest.mark.slow),
    pytest.param({STATE: "mirrored", "": "sharded"}, adagrad, 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("placement", "optimizer", "steps"), CASES)
def test_numbers_are_those_of_one_device(placement: Any, optimizer: Any, steps: int) -> None:
    strategy = sg.HybridStrategy(TWO, placement=placement)
    values = fitted(made(strategy, optimizer, steps))
    for value, expected in zip(values, fitted(made(None, optimizer)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def _memories(model: keras.Model) -> tuple[set[str], set[str]]:
    """Memory of large weights, and of their optimizer state."""
    model.optimizer.build(model.trainable_variables)
    weights, state = (
        {_memory(one) for one in variables if np.prod(one.shape) >= 1024}
        for variables in (model.variables, model.optimizer.variables)
    )
    return weights, state


def _memory(variable: Any) -> str:
    store = variable.store
    return "devices" if store is None else store.memory_kind or "shards"


@pytest.mark.parametrize(
    ("placement", "weights", "state"),
    [
        ({STATE: "pinned_host"}, {"devices"}, {"pinned_host"}),
        ({STATE: "pinned_host", "": "sharded"}, {"shards"}, {"pinned_host"}),
        ({STATE: "sharded", "": "pinned_host"}, {"pinned_host"}, {"shards"}),
        ({STATE: "mirrored", "": "sharded"}, {"shards"}, {"devices"}),
        ({"": "sharded"}, {"shards"}, {"shards"}),
    ],
)
def test_optimizer_state_has_a_place_of_its_own(placement: Any, weights: Any, state: Any) -> None:
    model = made(sg.HybridStrategy(TWO, placement=placement), adam)
    assert _memories(model) == (weights, state)


def test_state_of_central_variables_stays_with_them() -> None:
    strategy = sg.HybridStrategy(TWO, placement={STATE: "pinned_host", "items": "central"})
    model = made(strategy, adam)
    model.optimizer.build(model.trainable_variables)
    (table,) = model.get_layer("items").variables
    slots: list[Any] = [one for one in model.optimizer.variables if one.shape == table.shape]
    assert {slot.store for slot in slots} == {table.store}


@pytest.mark.parametrize("place", ["central", "server"])
def test_places_of_which_state_alone_has_none(place: str) -> None:
    with pytest.raises(ValueError, match=rf"the place '{place}' for sg.placement.optimizer_state"):
        sg.HybridStrategy(TWO, placement={STATE: place})


def test_optimizer_without_state_is_no_error() -> None:
    strategy = sg.HybridStrategy(TWO, placement={STATE: "pinned_host"})
    model = made(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit([X, IDS], Y, batch_size=22, verbose=0)
    assert not STATE(model.variables[0])

"""Arrays on an accelerator as data of `fit` and its kin: what Keras makes of them on the host.

Arrays on CPU stand for such arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.input import batches
from stratagem.keras.training import device_data
from tests.parity.comparison import differences, mirrored, regression
from tests.row_selections import count_selections
from tests.unit.keras.replicas import values_of

_X, _Y = regression(43)
_CLASSES = (np.median(_Y) < _Y).astype("float32")
_WEIGHTS = np.linspace(0.2, 2.0, 43, dtype="float32")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes all arrays of JAX for arrays on an accelerator; the calls that select rows."""
    for module in (batches, device_data):
        monkeypatch.setattr(module, "is_on_accelerator", lambda one: isinstance(one, jax.Array))
    return count_selections(monkeypatch)


def _model(strategy: sg.Strategy, steps: int) -> Any:
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), dense])
        model.compile("sgd", "mse", weighted_metrics=["mae"], steps_per_execution=steps)
    return model


def _job(model: Any, as_data: Callable[[Any], Any], **arguments: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    if "sample_weight" in arguments:
        arguments["sample_weight"] = as_data(arguments["sample_weight"])
    x, y = as_data(_X), as_data(_CLASSES)
    history = model.fit(x, y, batch_size=5, epochs=2, verbose=0, **arguments)
    evaluated = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    results = (
        {f"fit {key}": value for key, value in history.history.items()}
        | {f"evaluate {key}": value for key, value in evaluated.items()}
        | {"predict": model.predict(x, batch_size=5, verbose=0)}
        | {f"weight {index}": value for index, value in enumerate(values_of(model.weights))}
    )
    return {key: np.asarray(value) for key, value in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_replicas", "steps", "arguments"),
    [
        (1, 1, {"shuffle": False}),
        (1, 4, {"shuffle": "batch", "class_weight": {0: 1.0, 1: 3.0}}),
        (3, 1, {"shuffle": True, "sample_weight": _WEIGHTS}),
        (3, 4, {"shuffle": False, "validation_split": 0.3}),
        (3, 4, {"shuffle": True}),
        (1, 2, {"shuffle": True, "steps_per_epoch": 4}),
    ],
)
def test_arrays_on_a_device_train_as_those_on_the_host(
    num_replicas: int, steps: int, arguments: dict[str, Any], programs: list[Any]
) -> None:
    expected = _job(_model(mirrored(num_replicas), steps), np.asarray, **arguments)
    assert programs == []
    actual = _job(_model(mirrored(num_replicas), steps), jnp.asarray, **arguments)
    assert programs
    assert differences(actual, expected) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_group_of_steps_is_selected_by_one_program(shuffle: bool, programs: list[Any]) -> None:
    model = _model(mirrored(1), 10)
    x, y = jnp.ones((100, 3)), jnp.ones((100, 1))
    model.fit(x, y, batch_size=2, shuffle=shuffle, verbose=0)
    of_groups = [call["shape"] for call in programs if len(call["shape"]) > 1]
    assert of_groups == [(10, 2)] * 5
    assert len(programs) == 5 + 2  # Keras reads one batch before it trains.


def test_floats_of_other_types_are_cast_as_by_keras(programs: list[Any]) -> None:
    model = _model(mirrored(1), 2)
    x = jnp.asarray(_X, "bfloat16")
    predicted = model.predict(x, batch_size=5, verbose=0)
    assert programs
    np.testing.assert_array_equal(predicted, model.predict(np.asarray(x), verbose=0))


@pytest.mark.slow
def test_eager_models_and_models_without_a_strategy_get_what_keras_gives(
    programs: list[Any],
) -> None:
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).predict(
        jnp.ones((4, 3)), verbose=0
    )
    model = _model(mirrored(2), 1)
    model.run_eagerly = True
    x = jnp.asarray(_X)
    np.testing.assert_allclose(model.predict(x, verbose=0), _X.sum(1, keepdims=True), rtol=1e-5)
    model.fit(x, jnp.asarray(_Y), verbose=0)


@pytest.mark.slow
def test_model_without_a_shape_is_built_from_arrays_on_a_device(programs: list[Any]) -> None:
    with mirrored(2).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(jnp.asarray(_X), jnp.asarray(_Y), batch_size=5, verbose=0)
    assert model.weights[0].shape == (3, 1)
    assert programs

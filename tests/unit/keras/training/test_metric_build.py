"""Building of metrics without a trace of the model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg

_X, _Y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.int32)


class _Counted(keras.layers.Layer):
    """Counts the calls of the model around it."""

    num_calls = 0

    def call(self, x):
        type(self).num_calls += 1
        return x * 1.0


def _model(kind):
    if kind == "sequential":
        return keras.Sequential([keras.Input((3,)), _Counted(), keras.layers.Dense(2)])
    x = keras.Input((3,))
    y = keras.layers.Dense(2)(_Counted()(x))
    if kind == "two_outputs":
        return keras.Model(x, {"one": y, "two": keras.layers.Dense(1)(y)})
    return keras.Model(x, y)


def _compile(model, kind):
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if kind == "two_outputs":
        model.compile(
            "sgd",
            {"one": cross_entropy, "two": "mse"},
            metrics={"one": ["accuracy"], "two": ["mae"]},
        )
    else:
        model.compile("sgd", cross_entropy, metrics=["accuracy", "mse"])


def _labels(kind):
    return {"one": _Y, "two": _Y.astype(np.float32)} if kind == "two_outputs" else _Y


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sequential", marks=pytest.mark.slow),
        "functional",
        pytest.param("two_outputs", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_traced_once_and_reports_what_keras_reports(kind) -> None:
    keras.utils.set_random_seed(0)
    plain = _model(kind)
    _compile(plain, kind)
    expected = plain.fit(_X, _labels(kind), verbose=0).history
    keras.utils.set_random_seed(0)
    with sg.OneDeviceStrategy("cpu:0").scope():
        model = _model(kind)
        _compile(model, kind)
    _Counted.num_calls = 0
    history = model.fit(_X, _labels(kind), verbose=0).history
    assert _Counted.num_calls == 1
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.parametrize("kind", ["own_call", "open_shape", "not_built"])
def test_a_model_whose_outputs_are_not_known_is_traced_by_keras(kind) -> None:
    class OwnCall(keras.Model):
        def call(self, x):
            return self.dense(x)

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

    with sg.OneDeviceStrategy("cpu:0").scope():
        if kind == "own_call":
            model = OwnCall()
        elif kind == "not_built":
            model = keras.Sequential([keras.layers.Dense(2)])
        else:
            x = keras.Input((None, 3))
            model = keras.Model(x, keras.layers.Dense(2)(x))
        _compile(model, kind)
    x, y = (_X, _Y) if kind != "open_shape" else (_X[:, None], _Y[:, None])
    assert {"loss", "accuracy"} <= model.fit(x, y, verbose=0).history.keys()


def test_data_without_a_batch_is_an_error_of_keras() -> None:
    with sg.OneDeviceStrategy("cpu:0").scope():
        model = _model("functional")
        _compile(model, "functional")
    with pytest.raises(ValueError, match="empty generator"):
        model.fit((pair for pair in ()), shuffle=False, verbose=0)

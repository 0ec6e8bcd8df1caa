"""ServingInputReceiver and the functions that build it."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import stratagem as sg

export = sg.estimator.export


def test_raw_inputs_take_any_batch_by_default() -> None:
    features = {"x": np.zeros((7, 3), "int32"), "y": jax.ShapeDtypeStruct((1,), "float32")}
    make = export.build_raw_serving_input_receiver_fn
    shapes = {name: (one.shape, one.dtype) for name, one in make(features)().inputs.items()}
    assert shapes == {"x": ((None, 3), "int32"), "y": ((None,), "float32")}
    assert make(features, 2)().inputs["x"].shape == (2, 3)


def test_features_are_inputs_or_computed_of_them() -> None:
    x = keras.Input((2,), name="x")
    receiver = export.ServingInputReceiver({"one": x, "double": x * 2}, {"x": x})
    value = np.ones((3, 2), "float32")
    features = receiver.features_of({"x": value})
    assert features["one"] is value
    assert np.asarray(features["double"]).tolist() == [[2.0, 2.0]] * 3


def test_features_of_other_inputs_are_refused() -> None:
    values = {"x": np.ones((1, 2), "float32")}
    receiver = export.ServingInputReceiver(keras.Input((2,)), {"x": keras.Input((2,))})
    with pytest.raises(ValueError, match="Features cannot be computed from the receiver_tensors"):
        receiver.features_of(values)
    shape = jax.ShapeDtypeStruct((1, 2), "float32")
    receiver = export.ServingInputReceiver(shape, {"x": keras.Input((2,))})
    with pytest.raises(ValueError, match="receiver_tensors: a feature is not an input"):
        receiver.features_of(values)


def test_values_are_no_inputs() -> None:
    with pytest.raises(TypeError, match="ServingInputReceiver received"):
        export.ServingInputReceiver(np.ones(3), np.ones(3))


def test_alternatives_are_refused() -> None:
    x = keras.Input((2,))
    with pytest.raises(
        NotImplementedError, match="receiver_tensors_alternatives are not supported"
    ):
        export.ServingInputReceiver(x, x, {"other": x})

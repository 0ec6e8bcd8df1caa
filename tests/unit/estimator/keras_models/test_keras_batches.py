"""Conversion of batches to Keras inputs and of outputs to names."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from stratagem.estimator.keras_models.model_to_estimator import (
    inputs_of,
    output_names,
    outputs_by_name,
    split_weights,
    targets_of,
)

A, B, C = (np.full((2, 1), value, "float32") for value in (1, 2, 3))


def _functional(*, inputs: str = "list", outputs: str = "list") -> keras.Model:
    a, b = layers.Input((1,), name="a"), layers.Input((1,), name="b")
    sums = [layers.Add(name="sum")([a, b]), layers.Subtract(name="difference")([a, b])]
    given = {"list": [a, b], "dict": {"b": b, "a": a}}[inputs]
    made = {"list": sums, "dict": {"more": sums[0], "less": sums[1]}, "one": sums[0]}[outputs]
    return keras.Model(given, made)


def _sequential() -> keras.Model:
    return keras.Sequential([layers.Dense(2), layers.Dense(1, name="last")])


class _Subclassed(keras.Model):
    def call(self, x: Any) -> Any:
        return x


def test_weights_travel_among_features() -> None:
    assert split_weights({"features": A, "sample_weights": B}) == (A, B)
    for plain in (A, {"features": A}, {"features": A, "sample_weights": B, "c": C}):
        assert split_weights(plain) == (plain, None)


def test_features_by_name_are_in_the_order_of_the_inputs() -> None:
    features = {"b": B, "other": C, "a": A}
    assert inputs_of(_functional(), features) == [A, B]
    assert inputs_of(_functional(), [B, A]) == [B, A]


def test_model_that_takes_a_dict_gets_one_by_its_keys() -> None:
    features = {"b": B, "other": C, "a": A}
    assert inputs_of(_functional(inputs="dict"), features) == {"a": A, "b": B}


def test_only_feature_is_the_only_input_whatever_its_name() -> None:
    single = layers.Input((1,))
    for model in (_sequential(), keras.Model(single, layers.Dense(1)(single))):
        assert inputs_of(model, {"any": A}) is A
    listed = keras.Model([single], layers.Dense(1)(single))
    assert inputs_of(listed, {"any": A}) == [A]


def test_subclassed_model_gets_features_as_they_are() -> None:
    features = {"a": A, "b": B}
    assert inputs_of(_Subclassed(), features) is features


def test_missing_feature_is_named() -> None:
    with pytest.raises(ValueError, match=r"features has the names \['a', 'c'\] but lacks \['b'\]"):
        inputs_of(_functional(), {"a": A, "c": C})


@pytest.mark.parametrize(
    ("model", "outputs", "names"),
    [
        (_functional(), [A, B], ["sum", "difference"]),
        (_functional(outputs="one"), A, ["sum"]),
        (_functional(outputs="dict"), {"more": A, "less": B}, ["more", "less"]),
        (_sequential(), A, ["last"]),
        (_Subclassed(), (A, B), ["output_1", "output_2"]),
    ],
    ids=["functional", "one output", "dict", "sequential", "subclassed"],
)
def test_outputs_have_names(model: keras.Model, outputs: Any, names: list[str]) -> None:
    assert output_names(model, outputs) == names
    assert list(outputs_by_name(model, outputs)) == names
    assert outputs_by_name(model, outputs)[names[0]] is A


def test_labels_by_name_have_the_structure_of_the_outputs() -> None:
    labels = {"difference": B, "sum": A}
    assert targets_of(_functional(), [C, C], labels, "labels") == [A, B]
    assert targets_of(_functional(outputs="one"), C, {"sum": A}, "labels") is A
    assert targets_of(_functional(), [C, C], [A, B], "labels") == [A, B]
    assert targets_of(_functional(), [C, C], None, "labels") is None
    named = _functional(outputs="dict")
    outputs = {"more": C, "less": C}
    assert targets_of(named, outputs, {"less": B, "more": A}, "labels") == {"more": A, "less": B}


def test_missing_labels_are_named() -> None:
    with pytest.raises(ValueError, match=r"labels has the names \['sum'\] but lacks"):
        targets_of(_functional(), [C, C], {"sum": A}, "labels")


def test_weights_of_some_outputs_leave_the_others_alone() -> None:
    weights = targets_of(_functional(), [C, C], {"difference": B}, "sample_weights")
    assert weights == [None, B]


def test_weights_of_unknown_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample_weights has the unknown names \['total'\]"):
        targets_of(_functional(), [C, C], {"total": B}, "sample_weights")

"""Predictions are rows in input order."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    dense_layers,
    estimator_of,
    examples,
    plain_model,
)

X, Y = examples(19)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trained on several replicas; prediction still runs on one device."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = estimator_of(dense_classifier, tmp_path_factory.mktemp("model"), strategy)
    return estimator.train(dataset_of(X, Y, 4))


@pytest.fixture(scope="module")
def expected():
    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for start in range(0, 19, 8):
        model.train_on_batch(X[start : start + 8], Y[start : start + 8])
    return np.asarray(model(X))


def test_rows_are_those_of_plain_keras(trained, expected) -> None:
    rows = list(trained.predict(dataset_of(X, Y, 4)))
    assert [sorted(row) for row in rows] == [["classes", "logits"]] * 19
    np.testing.assert_allclose([row["logits"] for row in rows], expected, atol=1e-5)
    assert [int(row["classes"]) for row in rows] == expected.argmax(-1).tolist()


def test_features_alone_and_arrays_are_read_once(trained, expected) -> None:
    for data in (lambda: sg.input.Dataset(X, batch_size=8), lambda: X):
        rows = list(trained.predict(data, predict_keys="logits"))
        np.testing.assert_allclose([row["logits"] for row in rows], expected, atol=1e-5)
        assert list(rows[0]) == ["logits"]


def test_batches_as_they_are(trained) -> None:
    batches = list(trained.predict(dataset_of(X, Y, 8), yield_single_examples=False))
    assert [batch["logits"].shape for batch in batches] == [(8, 3), (8, 3), (3, 3)]


@pytest.mark.parametrize("keys", [["logits", "scores"], []])
def test_unknown_keys_are_refused(trained, keys) -> None:
    with pytest.raises(ValueError, match=r"is empty or contains unknown names: \[.*\]"):
        next(trained.predict(dataset_of(X, Y, 8), predict_keys=keys))


def array_function(features, labels, mode):
    outputs = keras.layers.Dense(1)(features)
    if mode == "infer":
        return sg.estimator.EstimatorSpec(mode, predictions=outputs)
    return sg.estimator.EstimatorSpec(
        mode, loss=keras.ops.mean(outputs), train_op=keras.optimizers.SGD()
    )


def test_an_array_has_no_keys(tmp_path) -> None:
    data = dataset_of(X, Y, 8)
    estimator = estimator_of(array_function, tmp_path).train(data)
    assert [row.shape for row in estimator.predict(data)] == [(1,)] * 19
    with pytest.raises(ValueError, match="cannot select from predictions without names"):
        next(estimator.predict(data, predict_keys=["logits"]))


def test_what_has_no_rows_comes_in_whole_batches_only(tmp_path) -> None:
    def model_fn(features, labels, mode):
        spec = array_function(features, labels, mode)
        if mode != "infer":
            return spec
        total = keras.ops.sum(spec.predictions)
        return sg.estimator.EstimatorSpec(mode, predictions={"total": total})

    data = dataset_of(X, Y, 8)
    estimator = estimator_of(model_fn, tmp_path).train(data)
    batches = list(estimator.predict(data, yield_single_examples=False))
    assert [batch["total"].shape for batch in batches] == [()] * 3
    with pytest.raises(ValueError, match="Predictions of a batch have the shapes"):
        next(estimator.predict(data))

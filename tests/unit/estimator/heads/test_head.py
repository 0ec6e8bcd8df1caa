"""Rules that all heads share: signatures, types of labels, weights, and missing arguments."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg

LABELS = np.array([[1], [1], [0], [1], [0]], np.int32)
LOGITS = np.array([[-2.0], [3.0], [0.5], [1.5], [-1.0]], np.float32)


def test_labels_that_are_numbers_stay_numbers() -> None:
    assert sg.estimator.MultiClassHead(3).encode_labels([2, 0]).dtype == np.int32
    assert sg.estimator.BinaryClassHead().encode_labels([0.0, 1.0]).dtype == np.float64
    assert sg.estimator.RegressionHead().encode_labels([1, 2]).dtype == np.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.BinaryClassHead(loss_reduction="none"), "loss_reduction='none'"),
        (lambda e: e.BinaryClassHead().loss(None, LOGITS), "labels is None"),
        (
            lambda e: e.BinaryClassHead().create_estimator_spec({}, "train", LOGITS, LABELS),
            "create_estimator_spec received optimizer=None",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)


def test_weight_column_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="weight_column=3"):
        sg.estimator.BinaryClassHead(weight_column=3)


def test_spec_of_a_prediction_has_tensorflows_signatures() -> None:
    head = sg.estimator.BinaryClassHead()
    spec = head.create_estimator_spec({}, sg.estimator.ModeKeys.PREDICT, LOGITS)
    assert set(spec.export_outputs) == {
        "serving_default",
        "classification",
        "regression",
        "predict",
    }
    regression = sg.estimator.RegressionHead()
    spec = regression.create_estimator_spec({}, sg.estimator.ModeKeys.PREDICT, LOGITS)
    assert set(spec.export_outputs) == {"serving_default", "regression", "predict"}

"""BinaryClassHead against NumPy and Keras metrics."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg

LABELS = np.array([[1], [1], [0], [1], [0]], np.int32)
LOGITS = np.array([[-2.0], [3.0], [0.5], [1.5], [-1.0]], np.float32)
WEIGHTS = {"w": np.array([1.0, 2.0, 0.0, 0.5, 4.0], np.float32)}


def cross_entropy(labels, logits) -> np.ndarray:
    return np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))


def metrics_of(head, features, logits, labels, **kwargs) -> dict[str, float]:
    made = head.update_metrics(head.metrics(**kwargs), features, logits, labels, **kwargs)
    return {key: float(metric.result()) for key, metric in made.items()}


def test_loss_of_two_classes_is_the_sigmoid_cross_entropy() -> None:
    losses = cross_entropy(LABELS, LOGITS)
    head = sg.estimator.BinaryClassHead()
    np.testing.assert_allclose(head.loss(LABELS, LOGITS), losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(head.loss(LABELS[:, 0], LOGITS), losses.mean(), rtol=1e-6)
    weighted = sg.estimator.BinaryClassHead(weight_column="w")
    expected = (losses[:, 0] * WEIGHTS["w"]).sum() / 5
    np.testing.assert_allclose(weighted.loss(LABELS, LOGITS, WEIGHTS), expected, rtol=1e-6)
    summed = sg.estimator.BinaryClassHead(weight_column="w", loss_reduction="sum")
    loss = summed.loss(LABELS, LOGITS, WEIGHTS, regularization_losses=[1.0, 2.0])
    np.testing.assert_allclose(loss, expected * 5 + 3.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, WEIGHTS["w"]], ids=["plain", "weighted"])
def test_metrics_of_two_classes_are_those_of_keras(weights) -> None:
    features = {} if weights is None else {"w": weights}
    head = sg.estimator.BinaryClassHead(
        weight_column=None if weights is None else "w", thresholds=[0.25]
    )
    made = metrics_of(head, features, LOGITS, LABELS)
    w = np.ones(5, np.float32) if weights is None else weights
    p, y = 1 / (1 + np.exp(-LOGITS[:, 0])), LABELS[:, 0]
    said = (p > 0.5).astype(int)
    mean = lambda values: (values * w).sum() / w.sum()  # noqa: E731
    true = ((said == 1) & (y == 1)) * w
    expected = {
        "average_loss": mean(cross_entropy(LABELS, LOGITS)[:, 0]),
        "accuracy": mean(said == y),
        "precision": true.sum() / (said * w).sum(),
        "recall": true.sum() / (y * w).sum(),
        "prediction/mean": mean(p),
        "label/mean": mean(y),
        "accuracy_baseline": max(mean(y), 1 - mean(y)),
        "accuracy/positive_threshold_0.25": mean((p > 0.25) == y),
        "precision/positive_threshold_0.25": (((p > 0.25) & (y == 1)) * w).sum()
        / ((p > 0.25) * w).sum(),
        "recall/positive_threshold_0.25": (((p > 0.25) & (y == 1)) * w).sum() / (y * w).sum(),
    }
    for curve, key in (("ROC", "auc"), ("PR", "auc_precision_recall")):
        metric = keras.metrics.AUC(curve=curve)
        metric.update_state(y, p, sample_weight=w)
        expected[key] = float(metric.result())
    assert made == pytest.approx(expected, rel=1e-5)


def test_predictions_of_two_classes_have_tensorflows_names() -> None:
    head = sg.estimator.BinaryClassHead(label_vocabulary=["no", "yes"])
    made = {key: np.asarray(value) for key, value in head.predictions(LOGITS).items()}
    p = 1 / (1 + np.exp(-LOGITS))
    np.testing.assert_allclose(made["logistic"], p, rtol=1e-6)
    np.testing.assert_allclose(made["probabilities"], np.hstack([1 - p, p]), rtol=1e-5)
    assert made["class_ids"].tolist() == [[0], [1], [1], [1], [0]]
    strings = head.decode(made)
    assert strings["classes"].tolist() == [[b"no"], [b"yes"], [b"yes"], [b"yes"], [b"no"]]
    assert strings["all_classes"][0].tolist() == [b"no", b"yes"]
    assert strings["all_class_ids"][0].tolist() == [0, 1]
    assert list(strings) == [
        "logits",
        "logistic",
        "probabilities",
        "class_ids",
        "classes",
        "all_class_ids",
        "all_classes",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.BinaryClassHead(thresholds=[1.0]), "thresholds="),
        (
            lambda e: e.BinaryClassHead(
                sg.feature_column.numeric_column("w", shape=(2,))
            ).loss(LABELS, LOGITS, {"w": np.ones((5, 2))}),
            "weight_column has 2 weights per example",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)

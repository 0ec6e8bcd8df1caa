"""RegressionHead against NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg

LABELS = np.array([[1], [1], [0], [1], [0]], np.int32)
LOGITS = np.array([[-2.0], [3.0], [0.5], [1.5], [-1.0]], np.float32)


def metrics_of(head, features, logits, labels, **kwargs) -> dict[str, float]:
    made = head.update_metrics(head.metrics(**kwargs), features, logits, labels, **kwargs)
    return {key: float(metric.result()) for key, metric in made.items()}


def test_loss_of_numbers_is_the_squared_error() -> None:
    labels, logits = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[0.0, 0.0], [1.0, 1.0]])
    head = sg.estimator.RegressionHead(label_dimension=2)
    np.testing.assert_allclose(head.loss(labels, logits), (1 + 4 + 4 + 16) / 4)
    each = sg.estimator.RegressionHead(2, sg.feature_column.numeric_column("w", shape=(2,)))
    weights = {"w": np.array([[1.0, 0.0], [0.0, 2.0]])}
    np.testing.assert_allclose(each.loss(labels, logits, weights), (1 + 32) / 4)
    made = metrics_of(head, {}, logits, labels, regularization_losses=[0.5])
    expected = {"average_loss": 6.25, "prediction/mean": 0.5, "label/mean": 2.75}
    assert made == pytest.approx({**expected, "regularization_loss": 0.5})


def test_own_loss_takes_the_place_of_the_heads() -> None:
    def absolute(labels, logits, features):
        return keras.ops.abs(labels - logits) * features["scale"]

    head = sg.estimator.RegressionHead(loss_fn=absolute)
    loss = head.loss(np.array([1.0, 2.0]), np.array([[0.0], [4.0]]), {"scale": 10.0})
    np.testing.assert_allclose(loss, 15.0)
    reduced = sg.estimator.RegressionHead(loss_fn=lambda labels, logits: keras.ops.sum(logits))
    with pytest.raises(ValueError, match="loss_fn returned shape"):
        reduced.loss(np.array([1.0]), np.array([[0.0]]))
    with pytest.raises(ValueError, match=r"loss_fn takes the arguments \['x'\]"):
        sg.estimator.RegressionHead(loss_fn=lambda x: x)


def test_predictions_of_numbers_go_through_the_inverse_link() -> None:
    head = sg.estimator.RegressionHead(inverse_link_fn=keras.ops.exp, name="rate")
    made = head.predictions(np.array([[0.0], [1.0]]))
    np.testing.assert_allclose(made["predictions"], [[1.0], [np.e]], rtol=1e-6)
    assert list(made) == ["predictions", "logits"]
    assert set(head.metrics()) == {
        "average_loss/rate",
        "prediction/mean/rate",
        "label/mean/rate",
    }
    assert list(sg.estimator.RegressionHead().predictions(np.array([[0.0]]))) == ["predictions"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.RegressionHead(0), "received label_dimension=0"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)

"""MultiClassHead against TensorFlow's documented values and NumPy."""

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


def test_loss_of_many_classes_is_the_softmax_cross_entropy() -> None:
    # Of the docstring of tf.estimator.MultiClassHead: 5.00, accuracy 0.50.
    logits = np.array([[10, 0, 0], [0, 10, 0]], np.float32)
    labels = np.array([[1], [1]])
    head = sg.estimator.MultiClassHead(n_classes=3)
    np.testing.assert_allclose(head.loss(labels, logits), 5.0, atol=1e-3)
    made = metrics_of(head, {}, logits, labels)
    assert set(made) == {"average_loss", "accuracy"}
    np.testing.assert_allclose([made["average_loss"], made["accuracy"]], [5.0, 0.5], atol=1e-3)


def test_predictions_of_many_classes_have_tensorflows_names() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]], np.float32)
    head = sg.estimator.MultiClassHead(3)
    made = {key: np.asarray(value) for key, value in head.predictions(logits).items()}
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(made["probabilities"], shares, rtol=1e-5)
    assert head.decode(made)["classes"].tolist() == [[b"1"], [b"0"]]
    assert list(head.predictions(logits, keys=["class_ids"])) == ["class_ids"]
    with pytest.raises(ValueError, match=r"Prediction keys \['logistic'\] are unknown"):
        head.predictions(logits, keys=["logistic"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.MultiClassHead(2), "n_classes=2"),
        (lambda e: e.MultiClassHead(3).loss(LABELS, LOGITS), "logits have shape"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)


def test_head_in_a_model_function_of_ones_own_trains(tmp_path) -> None:
    head = sg.estimator.MultiClassHead(3)

    def model_fn(features, labels, mode):
        logits = keras.layers.Dense(head.logits_dimension)(features)
        return head.create_estimator_spec(
            {}, mode, logits, labels, optimizer=keras.optimizers.SGD(0.5)
        )

    x = np.eye(3, dtype=np.float32)
    estimator = sg.estimator.Estimator(model_fn, model_dir=str(tmp_path))
    data = lambda: (x, np.arange(3, dtype=np.int32))  # noqa: E731
    estimator.train(data, steps=30)
    result = estimator.evaluate(data)
    assert result["accuracy"] == 1.0
    assert result["loss"] == pytest.approx(result["average_loss"], rel=1e-5)

"""BinaryClassHead against NumPy and Keras metrics."""

from __future__ import annotations

import math

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.premade.heads import LogisticRegressionHead, PoissonRegressionHead

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


# MultiClassHead against TensorFlow's documented values and NumPy.


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
    with pytest.raises(ValueError, match=r"received the unknown names \['logistic'\]"):
        head.predictions(logits, keys=["logistic"])


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


# RegressionHead against NumPy.


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


def test_predictions_of_numbers_go_through_the_inverse_link() -> None:
    head = sg.estimator.RegressionHead(inverse_link_fn=keras.ops.exp, name="rate")
    made = head.predictions(np.array([[0.0], [1.0]]))
    np.testing.assert_allclose(made["predictions"], [[1.0], [np.e]], rtol=1e-6)
    assert list(made) == ["predictions", "logits"]
    assert set(head.metrics()) == {"average_loss/rate", "prediction/mean/rate", "label/mean/rate"}
    assert list(sg.estimator.RegressionHead().predictions(np.array([[0.0]]))) == ["predictions"]


# Losses of the Poisson and logistic regression heads.

LINKED = np.array([[-1.0], [0.0], [1.5]], "float32")


def test_poisson_loss_is_the_negative_log_of_the_probability() -> None:
    counts = np.array([[0.0], [1.0], [6.0]], "float32")
    part, full = PoissonRegressionHead(compute_full_loss=False), PoissonRegressionHead()
    without = np.exp(LINKED) - counts * LINKED
    exact = without + [[math.lgamma(count + 1)] for count in counts[:, 0]]
    # Stirling's approximation of log 6! is off by 1/72.
    assert float(full.loss(counts, LINKED)) == pytest.approx(exact.mean(), abs=1 / 72 / 3 + 1e-5)
    assert float(full.loss(counts, LINKED)) < exact.mean()
    assert float(part.loss(counts, LINKED)) == pytest.approx(float(without.mean()), rel=1e-5)
    for head in (part, full):
        grads = jax.grad(lambda logits, head=head: head.loss(counts, logits))(LINKED)
        np.testing.assert_allclose(grads, (np.exp(LINKED) - counts) / 3, rtol=1e-5)


def test_logistic_loss_is_the_crossentropy_of_a_proportion() -> None:
    shares = np.array([[0.0], [0.25], [1.0]], "float32")
    p = 1 / (1 + np.exp(-LINKED))
    expected = -np.mean(shares * np.log(p) + (1 - shares) * np.log(1 - p))
    assert float(LogisticRegressionHead().loss(shares, LINKED)) == pytest.approx(expected, rel=1e-5)


def test_predictions_are_means() -> None:
    counted = PoissonRegressionHead().predictions(LINKED)
    np.testing.assert_allclose(counted["predictions"], np.exp(LINKED), rtol=1e-6)
    shared = LogisticRegressionHead().predictions(LINKED)
    np.testing.assert_allclose(shared["predictions"], 1 / (1 + np.exp(-LINKED)), rtol=1e-6)
    np.testing.assert_array_equal(shared["logits"], LINKED)


# Rules that all heads share: signatures, types of labels, weights, and missing arguments.


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


# Labels of classification heads: strings and ids, shapes and ranges.


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["b", "a"], [1, 0]), (np.array([[b"a"]]), [[0]]), (np.array(["a"], object), [0])],
)
def test_labels_that_are_strings_become_ids(labels, expected) -> None:
    head = sg.estimator.BinaryClassHead(label_vocabulary=["a", b"b"])
    ids = head.encode_labels(labels)
    assert (ids.tolist(), ids.dtype) == (expected, np.int32)


TWO_WEIGHTS = sg.feature_column.numeric_column("w", shape=(2,))
MISUSES = [
    (lambda e: e.BinaryClassHead(weight_column=3), "weight_column=3"),
    (lambda e: e.BinaryClassHead(thresholds=[1.0]), "thresholds="),
    (
        lambda e: e.BinaryClassHead(TWO_WEIGHTS).loss(LABELS, LOGITS, {"w": np.ones((5, 2))}),
        "weight_column has 2 weights per example",
    ),
    (lambda e: e.MultiClassHead(2), "n_classes=2 is below 3"),
    (lambda e: e.MultiClassHead(3).loss(LABELS, LOGITS), "logits have shape"),
    (lambda e: e.RegressionHead(0), "label_dimension=0"),
    (lambda e: e.BinaryClassHead(loss_reduction="none"), "received loss_reduction='none'"),
    (lambda e: e.BinaryClassHead().loss(None, LOGITS), "labels is None"),
    (
        lambda e: e.BinaryClassHead().create_estimator_spec({}, "train", LOGITS, LABELS),
        "create_estimator_spec received optimizer=None",
    ),
    (lambda e: e.BinaryClassHead(label_vocabulary=["a"]), "label_vocabulary="),
    (lambda e: e.BinaryClassHead().encode_labels(["a"]), "do not fit label_vocabulary="),
    (
        lambda e: e.BinaryClassHead(label_vocabulary=["a", "b"]).encode_labels(["c"]),
        "are not in label_vocabulary=",
    ),
    (lambda e: e.MultiClassHead(3).encode_labels([3]), "Labels range from 3 to 3"),
    (lambda e: e.RegressionHead().encode_labels(["a"]), "could not convert string to float"),
    (lambda e: e.BinaryClassHead().loss(LABELS[:2], LOGITS), "labels have shape"),
    (
        lambda e: e.MultiClassHead(3).loss(np.ones((2, 1), np.float32), np.ones((2, 3))),
        "labels have dtype float32",
    ),
    (
        lambda e: e.PoissonRegressionHead().encode_labels([[2], [-1]]),
        r"Labels of a Poisson regression include -1\.0",
    ),
    (
        lambda e: e.LogisticRegressionHead().encode_labels([[0], [2]]),
        r"a logistic regression range from 0\.0 to 2\.0",
    ),
]


@pytest.mark.parametrize(("call", "message"), MISUSES)
def test_misuse_is_refused(call, message) -> None:
    error = TypeError if message == "weight_column=3" else ValueError
    with pytest.raises(error, match=message):
        call(sg.estimator)


# Class names and ids that heads of two and of many classes share.

HEADS = [
    sg.estimator.BinaryClassHead(label_vocabulary=["a", "b"]),
    sg.estimator.MultiClassHead(3, label_vocabulary=["a", "b", "c"]),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_names_and_ids_are_inverse_to_one_another(head) -> None:
    ids = head.encode_labels(["b", "a", "b"])
    assert ids.tolist() == [1, 0, 1]
    assert head.decode({"classes": ids})["classes"].tolist() == [b"b", b"a", b"b"]


def test_classes_without_a_vocabulary_are_named_by_their_numbers() -> None:
    head = sg.estimator.MultiClassHead(12)
    assert head.decode({"classes": np.array([11, 2])})["classes"].tolist() == [b"11", b"2"]

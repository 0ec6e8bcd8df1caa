"""Wide-and-deep Estimators match a Keras model with two optimizers."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.premade.rows import (
    CLASSES,
    COUNT,
    batches,
    deep_columns,
    encoded_by_hand,
    inputs,
    plain_deep_logits,
    wide_columns,
)
from tests.unit.estimator.premade.training import (
    GLOBAL_BATCH,
    config,
    deep_name,
    first_weights,
    of_strategies,
    rows_of,
    weights_of,
)


def train_with_two_optimizers(model, optimizers, labels) -> None:
    """Trains one epoch with JAX gradients on one device."""
    encoded = encoded_by_hand()
    for optimizer, variables in optimizers:
        optimizer.build(variables)

    def loss_of(values, rows, start):
        with keras.StatelessScope(list(zip(model.trainable_variables, values, strict=True))):
            logits = model(rows)
        y = labels[start : start + GLOBAL_BATCH, None].astype(np.float32)
        return keras.ops.mean(keras.ops.binary_crossentropy(y, logits, from_logits=True))

    for start in range(0, COUNT, GLOBAL_BATCH):
        values = [variable.value for variable in model.trainable_variables]
        grads = jax.grad(loss_of)(values, rows_of(encoded, start), start)
        by_id = {id(v): g for v, g in zip(model.trainable_variables, grads, strict=True)}
        for optimizer, variables in optimizers:
            optimizer.apply([by_id[id(one)] for one in variables], variables)


@pytest.mark.slow
@of_strategies
def test_wide_and_deep_has_an_optimizer_for_each_part(make, num_replicas, tmp_path) -> None:
    def combined(**kwargs):
        return sg.estimator.DNNLinearCombinedClassifier(
            linear_feature_columns=wide_columns(),
            dnn_feature_columns=deep_columns(),
            dnn_hidden_units=[6],
            **kwargs,
        )

    labels = (CLASSES > 0).astype(np.int32)
    weights = first_weights(combined, labels, tmp_path, linear_optimizer=None, dnn_optimizer=None)
    x = inputs()
    wide = keras.layers.Dense(1, kernel_initializer="zeros", name="wide_part")
    model = keras.Model(x, plain_deep_logits(x, 1, [6]) + wide(x["wide"]))
    deep = [one for one in model.trainable_variables if not one.path.startswith("wide")]
    for variable in deep:
        variable.assign(weights[deep_name(variable)])
    train_with_two_optimizers(
        model,
        [
            (keras.optimizers.Adagrad(0.001), deep),
            (keras.optimizers.Ftrl(0.005), wide.trainable_variables),
        ],
        labels,
    )

    estimator = combined(config=config(make()), model_dir=str(tmp_path))
    data = batches(labels, GLOBAL_BATCH // num_replicas)
    estimator.train(data)
    trained = weights_of(estimator)
    for variable in deep:
        expected = np.asarray(variable)
        np.testing.assert_allclose(trained[deep_name(variable)], expected, rtol=1e-5, atol=1e-6)
    tables = ["age_bucketized", "age_bucketized_X_city", "city"]
    names = [f"linear/linear_model/{one}_weights/embeddings" for one in tables]
    kernel = np.concatenate([trained[name] for name in names])
    assert np.abs(kernel).max() > 1e-3
    np.testing.assert_allclose(kernel, np.asarray(wide.kernel), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        trained["linear/linear_model/bias_weights"], np.asarray(wide.bias), rtol=1e-4, atol=1e-6
    )

    probabilities = 1 / (1 + np.exp(-model.predict(encoded_by_hand(), verbose=0)))
    result = estimator.evaluate(data)
    for key, curve in (("auc", "ROC"), ("auc_precision_recall", "PR")):
        metric = keras.metrics.AUC(curve=curve)
        metric.update_state(labels[:, None], probabilities)
        assert result[key] == pytest.approx(float(metric.result()), rel=1e-4)
    assert result["label/mean"] == pytest.approx(labels.mean(), rel=1e-5)
    assert result["prediction/mean"] == pytest.approx(probabilities.mean(), rel=1e-4)
    baseline = max(labels.mean(), 1 - labels.mean())
    assert result["accuracy_baseline"] == pytest.approx(baseline, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda e: e.DNNLinearCombinedRegressor(),
            "Neither linear_feature_columns nor dnn_feature_columns",
        ),
        (
            lambda e: e.DNNLinearCombinedRegressor(dnn_feature_columns=deep_columns()),
            "dnn_feature_columns are set, but dnn_hidden_units=None",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)

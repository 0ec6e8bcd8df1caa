"""Deep Estimators match plain Keras models with the same weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.premade.rows import (
    CLASSES,
    COUNT,
    FEATURES,
    NAMES,
    NUMBERS,
    batches,
    deep_columns,
    encoded_by_hand,
    inputs,
    plain_deep_logits,
    wide_columns,
)
from tests.unit.estimator.premade.training import (
    GLOBAL_BATCH,
    VOCABULARY,
    config,
    deep_name,
    first_weights,
    of_strategies,
    rows_of,
    set_deep_weights,
    weights_of,
)


def assert_deep_weights(estimator, model: keras.Model) -> None:
    trained = weights_of(estimator)
    assert len(model.trainable_variables) >= 5
    for variable in model.trainable_variables:
        name = deep_name(variable)
        np.testing.assert_allclose(
            trained[name], np.asarray(variable), rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.slow
@of_strategies
def test_dnn_classifier_of_strings_is_that_of_one_device(make, num_replicas, tmp_path) -> None:
    def dnn(**kwargs):
        return sg.estimator.DNNClassifier(
            [8, 4],
            deep_columns(),
            n_classes=3,
            weight_column="w",
            label_vocabulary=VOCABULARY,
            **kwargs,
        )

    weights = first_weights(dnn, NAMES, tmp_path, optimizer=None)
    x, w = encoded_by_hand(), FEATURES["w"]
    plain_inputs = inputs()
    model = keras.Model(plain_inputs, plain_deep_logits(plain_inputs, 3, [8, 4]))
    set_deep_weights(model, weights)
    model.compile(
        keras.optimizers.Adagrad(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    for start in [*range(0, COUNT, GLOBAL_BATCH)] * 2:
        rows = slice(start, start + GLOBAL_BATCH)
        model.train_on_batch(rows_of(x, start), CLASSES[rows], sample_weight=w[rows])

    estimator = dnn(
        optimizer=keras.optimizers.Adagrad(0.1), config=config(make()), model_dir=str(tmp_path)
    )
    data = batches(NAMES, GLOBAL_BATCH // num_replicas)
    estimator.train(data)
    # The second epoch goes on from the checkpoint under another strategy.
    other = dnn(optimizer=keras.optimizers.Adagrad(0.1), config=config(), model_dir=str(tmp_path))
    other.train(batches(NAMES, GLOBAL_BATCH))
    assert_deep_weights(other, model)

    logits = model.predict(x, verbose=0)
    losses = keras.losses.sparse_categorical_crossentropy(CLASSES, logits, from_logits=True)
    result = estimator.evaluate(data)
    said = logits.argmax(axis=1)
    assert result == pytest.approx(
        {
            "accuracy": (w * (said == CLASSES)).sum() / w.sum(),
            "average_loss": float((w * losses).sum() / w.sum()),
            "loss": float((w * losses).mean()),
            "global_step": 6,
        },
        rel=1e-5,
    )
    predicted = list(estimator.predict(data))
    np.testing.assert_allclose([row["logits"] for row in predicted], logits, rtol=1e-4, atol=1e-5)
    assert [row["classes"][0].decode() for row in predicted] == [VOCABULARY[i] for i in said]


@pytest.mark.slow
def test_dnn_regressor_of_two_numbers_with_dropout_and_batch_norm_learns(tmp_path) -> None:
    regressor = sg.estimator.DNNRegressor(
        [8],
        deep_columns(),
        model_dir=str(tmp_path),
        label_dimension=2,
        optimizer="Adam",
        activation_fn=keras.ops.tanh,
        dropout=0.25,
        batch_norm=True,
        config=config(sg.MirroredStrategy(["cpu:0", "cpu:1"])),
    )
    labels = np.stack([NUMBERS, -NUMBERS], axis=1)
    regressor.train(batches(labels, 4))
    names = regressor.get_variable_names()
    assert {"dnn/batchnorm_0/moving_mean", "dnn/hiddenlayer_0/kernel"} <= set(names)
    assert np.abs(regressor.get_variable_value("dnn/batchnorm_0/moving_mean")).max() > 0
    first, second = (regressor.evaluate(batches(labels, 4)) for _ in range(2))
    assert first == second  # nothing is dropped in evaluation
    rows = list(regressor.predict(lambda: {key: FEATURES[key][:3] for key in ("age", "city")}))
    assert [row["predictions"].shape for row in rows] == [(2,)] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.DNNClassifier([], deep_columns()), r"hidden_units=\[\] or dropout=None"),
        (
            lambda e: e.DNNRegressor([4], deep_columns(), optimizer="Adamw"),
            "optimizer='Adamw' is not an optimizer",
        ),
        (lambda e: e.DNNRegressor([4], deep_columns(), optimizer=3), "optimizer=3 is not an"),
        (
            lambda e: e.DNNClassifier([4], wide_columns()).train(
                lambda: (FEATURES, CLASSES > 0), steps=1
            ),
            "DenseFeatures received the categorical column",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)

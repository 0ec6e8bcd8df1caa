"""Linear Estimators match a Keras model, take arrays and datasets, and are exported."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.premade.rows import (
    COUNT,
    FEATURES,
    NAMES,
    NUMBERS,
    batches,
    encoded_by_hand,
    wide_columns,
)
from tests.unit.estimator.premade.training import (
    GLOBAL_BATCH,
    VOCABULARY,
    config,
    of_strategies,
)


@pytest.mark.slow
@of_strategies
def test_linear_regressor_with_sums_is_that_of_one_device(make, num_replicas, tmp_path) -> None:
    x = keras.Input((13,))
    model = keras.Model(x, keras.layers.Dense(1, kernel_initializer="zeros")(x))
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(keras.optimizers.Ftrl(0.2), loss)
    wide = encoded_by_hand()["wide"]
    for start in range(0, COUNT, GLOBAL_BATCH):
        rows = slice(start, start + GLOBAL_BATCH)
        model.train_on_batch(wide[rows], NUMBERS[rows, None])

    regressor = sg.estimator.LinearRegressor(
        wide_columns(), loss_reduction="sum", config=config(make()), model_dir=str(tmp_path)
    )
    data = batches(NUMBERS, GLOBAL_BATCH // num_replicas)
    regressor.train(data)
    predicted = [row["predictions"] for row in regressor.predict(data)]
    expected = model.predict(wide, verbose=0)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)
    result = regressor.evaluate(data)
    assert result["average_loss"] == pytest.approx(
        ((expected[:, 0] - NUMBERS) ** 2).mean(), rel=1e-4
    )
    assert result["prediction/mean"] == pytest.approx(expected.mean(), rel=1e-4)


@pytest.mark.slow
def test_one_batch_of_arrays_and_datasets_are_input_too(tmp_path) -> None:
    classifier = sg.estimator.LinearClassifier(
        wide_columns(), n_classes=3, label_vocabulary=VOCABULARY, model_dir=str(tmp_path)
    )
    classifier.train(lambda: (FEATURES, NAMES), steps=2)
    classifier.train(lambda: sg.input.Dataset((FEATURES, NAMES), batch_size=11))
    assert classifier.get_variable_value("global_step") == 4
    of_arrays = classifier.evaluate(lambda: (FEATURES, NAMES), steps=1)
    of_dataset = classifier.evaluate(
        lambda mode: sg.input.Dataset((FEATURES, NAMES), batch_size=5 if mode == "eval" else 1)
    )
    assert of_arrays == pytest.approx(of_dataset, rel=1e-5)


def test_export_predicts_of_encoded_features_what_the_estimator_predicts(tmp_path) -> None:
    pytest.importorskip(
        "flatbuffers", reason="exports need it: pip install 'stratagem[checkpoint]'"
    )
    columns = wide_columns()
    classifier = sg.estimator.LinearClassifier(
        columns, n_classes=3, label_vocabulary=VOCABULARY, model_dir=str(tmp_path / "model")
    )
    classifier.train(lambda: (FEATURES, NAMES), steps=2)
    encoded = sg.feature_column.encode_features(FEATURES, columns)
    receiver_fn = sg.estimator.export.build_raw_serving_input_receiver_fn(encoded)
    path = classifier.export_saved_model(str(tmp_path / "export"), receiver_fn)
    served = sg.estimator.load_exported(path)["serving_default"](**encoded)
    predicted = list(classifier.predict(lambda: FEATURES))
    np.testing.assert_allclose(
        served["scores"], [row["probabilities"] for row in predicted], rtol=1e-5
    )
    assert np.asarray(served["classes"])[0].tolist() == [0, 1, 2]

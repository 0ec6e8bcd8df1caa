"""Deep Estimators match plain Keras models with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.premade import estimators
from stratagem.estimator.spec import optimizer_factory
from tests.unit.estimator.premade_data import (
    CLASSES,
    COUNT,
    FEATURES,
    GLOBAL_BATCH,
    NAMES,
    NUMBERS,
    VOCABULARY,
    batches,
    config,
    deep_columns,
    deep_name,
    encoded_by_hand,
    first_weights,
    inputs,
    plain_deep_logits,
    rows_of,
    set_deep_weights,
    weights_of,
    wide_columns,
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
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_dnn_classifier_of_strings_is_that_of_one_device(num_replicas, tmp_path) -> None:
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

    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    estimator = dnn(
        optimizer=keras.optimizers.Adagrad(0.1), config=config(strategy), model_dir=str(tmp_path)
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


# Wide-and-deep Estimators match a Keras model with two optimizers.


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
def test_wide_and_deep_has_an_optimizer_for_each_part(tmp_path) -> None:
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

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = combined(config=config(strategy), model_dir=str(tmp_path))
    data = batches(labels, GLOBAL_BATCH // 2)
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


# Networks of pre-made Estimators against NumPy, and hidden layers that are refused.

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
COLUMNS = (sg.feature_column.numeric_column("x", shape=(3,)),)


def deep(units: int, hidden: Sequence[int] = (4, 2), *, training: bool, **changes: Any) -> Any:
    options = {"activation_fn": None, "dropout": None, "batch_norm": False, **changes}
    part = estimators._deep_part(COLUMNS, "SGD", None, hidden, **options)
    return part.network({"x": X}, units, training)


def test_hidden_layers_are_relu_of_products() -> None:
    logits, variables = deep(3, training=True)
    assert [variable.path for variable in variables] == [
        f"dnn/{layer}/{kind}"
        for layer in ("hiddenlayer_0", "hiddenlayer_1", "logits")
        for kind in ("kernel", "bias")
    ]
    values = [np.asarray(variable) for variable in variables]
    net = X
    for kernel, bias in ((values[0], values[1]), (values[2], values[3])):
        net = np.maximum(net @ kernel + bias, 0)
    np.testing.assert_allclose(logits, net @ values[4] + values[5], rtol=1e-5, atol=1e-6)


def test_dropout_is_for_training_alone() -> None:
    logits, variables = deep(1, [64], dropout=0.5, training=False)
    kernel, bias, last, _ = map(np.asarray, variables)
    expected = np.maximum(X @ kernel + bias, 0) @ last
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_adds_two_trained_vectors_for_each_hidden_layer() -> None:
    _, variables = deep(1, batch_norm=True, training=True)
    assert [variable.path for variable in variables if "batchnorm" in variable.path] == [
        f"dnn/batchnorm_{layer}/{kind}" for layer in (0, 1) for kind in ("gamma", "beta")
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": [4, 0]}, "`units`"),
        ({"dropout": -0.1}, "dropout=-0.1 is not a fraction"),
        # Who thinks of TensorFlow 1's keep_prob would train on nothing.
        ({"dropout": 1.0}, "dropout=1.0 is not a fraction"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_are_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        deep(1, training=True, **changes)


def test_no_hidden_layer_is_a_linear_model() -> None:
    logits, (kernel, bias) = deep(2, [], training=True)
    np.testing.assert_allclose(logits, X @ np.asarray(kernel) + bias, rtol=1e-5, atol=1e-6)


def test_list_of_hidden_layers_may_change_afterwards() -> None:
    hidden = [4]
    part = estimators._deep_part(COLUMNS, "SGD", None, hidden, "relu", None, False)
    hidden.append(2)
    assert len(part.network({"x": X}, 1, True)[1]) == 4


# Linear Estimators match a Keras model, take arrays and datasets, and are exported.


@pytest.mark.slow
def test_linear_regressor_with_sums_is_that_of_one_device(tmp_path) -> None:
    x = keras.Input((13,))
    model = keras.Model(x, keras.layers.Dense(1, kernel_initializer="zeros")(x))
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(keras.optimizers.Ftrl(0.2), loss)
    wide = encoded_by_hand()["wide"]
    for start in range(0, COUNT, GLOBAL_BATCH):
        rows = slice(start, start + GLOBAL_BATCH)
        model.train_on_batch(wide[rows], NUMBERS[rows, None])

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    regressor = sg.estimator.LinearRegressor(
        wide_columns(), loss_reduction="sum", config=config(strategy), model_dir=str(tmp_path)
    )
    data = batches(NUMBERS, GLOBAL_BATCH // 2)
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


# Baseline Estimators learn the label distribution.


def _data(features: dict[str, Any], labels: Any) -> Any:
    return lambda: sg.input.Dataset((features, labels), batch_size=len(labels) // 2)


@pytest.mark.slow
def test_regressor_learns_the_weighted_mean_under_a_strategy() -> None:
    labels = np.array([[1.0], [2.0], [6.0], [7.0]], "float32")
    weights = np.array([1.0, 1.0, 1.0, 5.0], "float32")
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    config = sg.estimator.RunConfig(train_distribute=strategy)
    regressor = sg.estimator.BaselineRegressor(weight_column="w", optimizer="SGD", config=config)
    data = _data({"name": np.array(["a", "b", "c", "d"]), "w": weights}, labels)
    for _ in range(20):
        regressor.train(data)

    expected = np.average(labels[:, 0], weights=weights)
    rows = list(regressor.predict(data))
    assert [row["predictions"][0] for row in rows] == pytest.approx([expected] * 4, rel=1e-4)
    assert regressor.get_variable_names()[:1] == ["baseline/bias"]


@pytest.mark.slow
def test_first_step_of_ftrl_is_that_of_keras() -> None:
    labels = np.array([1, 2, 2, 0, 2, 2])
    classifier = sg.estimator.BaselineClassifier(n_classes=3)
    classifier.train(_data({"x": np.zeros(6)}, labels), steps=2)

    bias = keras.Variable(np.zeros(3, "float32"))
    optimizer = keras.optimizers.Ftrl(0.3)
    for half in (labels[:3], labels[3:]):
        logits = np.asarray(bias.value)
        softmax = np.exp(logits) / np.exp(logits).sum()
        optimizer.apply([softmax - np.eye(3, dtype="float32")[half].mean(axis=0)], [bias])
    got = classifier.get_variable_value("baseline/bias")
    np.testing.assert_allclose(got, np.asarray(bias.value), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "name", "rate"),
    [
        (sg.estimator.BaselineRegressor, "baseline/bias", 0.3),
        (
            lambda optimizer: sg.estimator.LinearRegressor(COLUMNS, optimizer=optimizer),
            "linear/linear_model/bias_weights",
            0.2,
        ),
    ],
)
def test_rates_of_optimizers_by_name_are_tensorflows(make, name, rate) -> None:
    estimator = make(optimizer="SGD")
    estimator.train(lambda: ({"x": np.zeros((2, 3))}, np.ones(2)), steps=1)
    assert estimator.get_variable_value(name) == pytest.approx([2 * rate])


# Optimizers from names, objects and functions are new in each call.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Adagrad", keras.optimizers.Adagrad),
        ("Adam", keras.optimizers.Adam),
        ("Ftrl", keras.optimizers.Ftrl),
        ("RMSProp", keras.optimizers.RMSprop),
        ("SGD", keras.optimizers.SGD),
    ],
)
def test_names_are_those_of_tensorflow(name, kind) -> None:
    made = optimizer_factory(name, 0.25)()
    assert type(made) is kind
    assert float(made.learning_rate) == 0.25
    assert float(optimizer_factory(name)().learning_rate) == float(kind().learning_rate)


def test_optimizers_are_copied_with_their_settings_or_made_anew() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    inner = keras.optimizers.SGD(schedule, momentum=0.5, name="mine")
    make = optimizer_factory(keras.optimizers.LossScaleOptimizer(inner))
    first, second = make(), make()
    assert first is not second
    assert not first.built
    assert first.inner_optimizer.momentum == 0.5
    assert first.inner_optimizer.name != "mine"
    assert float(first.inner_optimizer.learning_rate) == 0.5
    of_function = optimizer_factory(lambda: keras.optimizers.SGD(0.5))
    assert of_function() is not of_function()
    with pytest.raises(ValueError, match="optimizer='Sgd' is of type str"):
        optimizer_factory("Sgd")


# Arguments and labels that every pre-made Estimator refuses.


MISUSES = [
    (lambda e: e.DNNRegressor([4], deep_columns(), optimizer=3), "optimizer=3 is of type int"),
    (
        lambda e: e.DNNClassifier([4], wide_columns()).train(
            lambda: (FEATURES, CLASSES > 0), steps=1
        ),
        "DenseFeatures received the categorical column",
    ),
    (lambda e: e.DNNLinearCombinedRegressor(), "There are 0 linear_feature_columns and 0 dnn"),
    (
        lambda e: e.DNNLinearCombinedRegressor(dnn_feature_columns=deep_columns()),
        "and 2 dnn_feature_columns with dnn_hidden_units=None",
    ),
    (lambda e: e.DNNClassifier([4], []), "feature_columns is empty"),
    (
        lambda e: e.LinearClassifier(wide_columns()).train(lambda: FEATURES),
        "input_fn returned labels of type NoneType",
    ),
    (
        lambda e: e.LinearClassifier(wide_columns()).train(lambda: (FEATURES, NAMES)),
        "do not fit label_vocabulary=None",
    ),
]


@pytest.mark.parametrize(("call", "message"), MISUSES)
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)

"""Converted Keras models train like the model's own `fit`."""

from __future__ import annotations

from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
from keras import layers

import stratagem as sg
from stratagem.estimator import export
from stratagem.estimator.export import load_exported
from stratagem.estimator.keras_models import (
    KerasModelFunction,
    inputs_of,
    model_to_estimator,
    output_names,
    outputs_by_name,
    split_weights,
    targets_of,
)
from stratagem.estimator.run_config import RunConfig

_BATCH = 8


def _strategy(replicas: int) -> sg.MirroredStrategy | None:
    """Returns None for one replica."""
    return sg.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) if replicas > 1 else None


def _config(replicas: int, **settings: Any) -> RunConfig:
    strategy = _strategy(replicas)
    return RunConfig(train_distribute=strategy, eval_distribute=strategy, **settings)


def _input_fn(x: Any, y: Any, replicas: int) -> Any:
    return lambda: sg.input.Dataset((x, y), batch_size=_BATCH // replicas)


def _vectors(count: int = 30, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """The last batch is short."""
    x = np.random.default_rng(0).normal(size=(count, size)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("int32") + (x[:, 0] > 1)


def _classifier() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = layers.Input((6,))
    hidden = layers.Dense(8, "relu", name="hidden", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, layers.Dense(3, name="classes")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, name="adam"), loss, metrics=["accuracy"])
    return model


def _fit(model: keras.Model, x: Any, y: Any, epochs: int = 1, **arguments: Any) -> None:
    model.fit(x, y, batch_size=_BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments)


def _assert_same_evaluation(estimator: Any, input_fn: Any, expected: dict[str, Any]) -> None:
    results = estimator.evaluate(input_fn)
    assert {name: results[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def _assert_same_variables(estimator: Any, variables: Any) -> None:
    """Returns the model's weights by path, without a Sequential model's name."""
    names = estimator.get_variable_names()
    for variable in variables:
        name = variable.path if variable.path in names else variable.path.partition("/")[2]
        value = estimator.get_variable_value(name)
        np.testing.assert_allclose(value, variable.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


_KINDS = {
    "one": lambda: None,
    "four": lambda: _strategy(4),
    "in parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "hybrid": lambda: sg.HybridStrategy(
        ["cpu:0", "cpu:1"], placement={"hidden/kernel": "sharded", "classes/bias": "central"}
    ),
    "groups": lambda: sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_training_goes_on_as_fit_does(kind: str) -> None:
    x, y = _vectors(32 if kind == "one" else 30)
    model = _classifier()
    _fit(model, x, y)
    strategy = _KINDS[kind]()
    config = RunConfig(train_distribute=strategy, eval_distribute=strategy)
    estimator = model_to_estimator(model, config=config)
    data = _input_fn(x, y, 1 if strategy is None else strategy.num_replicas_in_sync)
    before = model.evaluate(x, y, batch_size=_BATCH, verbose=0, return_dict=True)
    _assert_same_evaluation(estimator, data, {**before, "global_step": 0})

    _fit(model, x, y, epochs=2)  # the Estimator does not see it
    for _ in range(2):
        estimator.train(data)

    after = model.evaluate(x, y, batch_size=_BATCH, verbose=0, return_dict=True)
    assert after["loss"] < before["loss"]
    _assert_same_evaluation(estimator, data, {**after, "global_step": 2 * 4})
    _assert_same_variables(estimator, (*model.variables, *model.optimizer.variables))
    rows = np.stack([row["classes"] for row in estimator.predict(data)])
    np.testing.assert_allclose(rows, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_cnn_with_batch_normalization_and_dropout() -> None:
    images = np.random.default_rng(1).normal(size=(24, 8, 8, 1)).astype("float32")
    labels = (images.mean(axis=(1, 2, 3)) > 0).astype("int32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(2, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    estimator = model_to_estimator(model)
    estimator.train(_input_fn(images, labels, 1))
    estimator.train(_input_fn(images, labels, 1))

    _fit(model, images, labels, epochs=2)
    _assert_same_variables(estimator, model.weights)
    state = estimator.get_variable_value("seed_generator/seed_generator_state")
    (seeds,) = [one for one in model.variables if "seed" in one.path]
    np.testing.assert_array_equal(state, seeds.numpy())
    expected = model.evaluate(images, labels, verbose=0, return_dict=True)
    _assert_same_evaluation(estimator, _input_fn(images, labels, 1), expected)


def _two_headed(*, named: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    a, b = layers.Input((3,), name="a"), layers.Input((2,), name="b")
    hidden = layers.Dense(4, "tanh")(layers.Concatenate()([a, b]))
    age = layers.Dense(1, name="age")(hidden)
    kind = layers.Dense(3, "softmax", name="kind")(hidden)
    if named:
        model = keras.Model({"a": a, "b": b}, {"age": age, "kind": kind})
    else:
        model = keras.Model([a, b], [age, kind])
    model.compile(
        "adam",
        {"age": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"age": 0.5, "kind": 2.0},
        metrics={"age": ["mae"], "kind": ["accuracy"]},
        weighted_metrics={"age": ["mse"]},
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "named"), [(1, False), (2, True)])
def test_several_inputs_and_outputs_by_name_with_weights(replicas: int, named: bool) -> None:
    draw = np.random.default_rng(2)
    x = {"b": draw.normal(size=(16, 2)), "a": draw.normal(size=(16, 3))}
    x = {name: value.astype("float32") for name, value in x.items()}
    y = {"kind": (x["a"][:, 0] > 0).astype("int32"), "age": x["b"][:, :1]}
    weights = {name: draw.uniform(size=16).astype("float32") for name in ("age", "kind")}
    model = _two_headed(named=named)
    estimator = model_to_estimator(
        model,
        config=_config(replicas),
        metric_names_map={"age_mae": "error", "kind_accuracy": "right", "age_mse": "weighted"},
    )
    # A feature that the model does not take, as in TensorFlow.
    features = {"features": {**x, "other": x["a"]}, "sample_weights": weights}
    for _ in range(2):
        estimator.train(_input_fn(features, y, replicas))

    order = ["age", "kind"]
    args = (x, y) if named else ([x["a"], x["b"]], [y[name] for name in order])
    given = weights if named else [weights[name] for name in order]
    _fit(model, *args, epochs=2, sample_weight=given)
    expected = model.evaluate(
        *args, batch_size=_BATCH, sample_weight=given, verbose=0, return_dict=True
    )
    results = estimator.evaluate(_input_fn(features, y, replicas))
    assert sorted(results) == ["error", "global_step", "loss", "right", "weighted"]
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert results["error"] == pytest.approx(expected["age_mae"], rel=1e-5)
    assert results["right"] == pytest.approx(expected["kind_accuracy"], rel=1e-5)
    assert results["weighted"] == pytest.approx(expected["age_mse"], rel=1e-5)
    predicted = model.predict(args[0], verbose=0)
    rows = list(estimator.predict(_input_fn(x, y, replicas)))
    for place, name in enumerate(order):
        outputs = predicted[name if named else place]
        np.testing.assert_allclose(
            np.stack([row[name] for row in rows]), outputs, rtol=1e-4, atol=1e-6
        )


class _Halved(keras.optimizers.SGD):
    """Model of an unregistered class."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(0.5 * gradient, variable, learning_rate)


class _Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(keras.ops.mean(self.scale**2))
        return x * self.scale


def _absolute(y_true, y_pred):
    return keras.ops.abs(y_true - y_pred)


def test_own_optimizer_layer_loss_and_schedule() -> None:
    x, _ = _vectors(24)
    y = x[:, :1]
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((6,)), _Scaled(), layers.Dense(1, name="sum")])
    model.compile(
        _Halved(schedule, clipnorm=1.0),
        _absolute,
        metrics=[_absolute, keras.metrics.RootMeanSquaredError(name="root")],
    )
    estimator = model_to_estimator(model, config=_config(2))
    estimator.train(_input_fn(x, y, 2), steps=3)

    _fit(model, x, y)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    _assert_same_evaluation(estimator, _input_fn(x, y, 2), expected)
    assert set(expected) == {"loss", "_absolute", "root"}


def test_frozen_layers_keep_their_weights() -> None:
    x, y = _vectors()
    model = _classifier()
    model.layers[1].trainable = False
    model.compile("sgd", "mse")
    estimator = model_to_estimator(model)
    estimator.train(lambda: (x, np.eye(3, dtype="float32")[y]), steps=2)
    first, last = model.layers[1:]
    _assert_same_variables(estimator, first.variables)
    trained = estimator.get_variable_value("classes/kernel")
    assert np.any(trained != last.kernel.numpy())


def test_model_without_weights_gets_them_from_the_first_batch() -> None:
    x, _ = _vectors()
    model = keras.Sequential([layers.Dense(1, name="only")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    estimator = model_to_estimator(model)
    estimator.train(lambda: (x, x[:, :1]), steps=50)
    assert not model.built
    rows = np.stack([row["only"] for row in estimator.predict(lambda: {"any": x})])
    assert np.mean((rows - x[:, :1]) ** 2) < 0.1 * np.mean(x[:, 0] ** 2)


class _Subclassed(keras.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units, name="dense")

    def call(self, x):
        return [self.dense(x["x"]), -self.dense(x["x"])]

    def get_config(self):
        return {"units": self.units, "name": self.name}


@pytest.mark.slow
def test_subclassed_model_that_can_be_copied() -> None:
    x, y = _vectors(size=3)
    x, y = {"x": x}, [y[:, None].astype("float32")] * 2
    model = _Subclassed(1, name="two")
    model.compile("sgd", ["mse", "mse"])
    model(x)
    estimator = model_to_estimator(model, config=_config(2))
    data = lambda: sg.input.Dataset((x, tuple(y)), batch_size=_BATCH // 2)  # noqa: E731
    estimator.train(data)
    _fit(model, x, y)
    _assert_same_variables(estimator, model.variables)
    row = next(estimator.predict(data))
    assert row["output_1"] == -row["output_2"]


class _NotDescribed(_Subclassed):
    def get_config(self):
        raise NotImplementedError


class _Forgetful(_Subclassed):
    def get_config(self):
        return {"units": 1, "name": self.name}


def test_copy_with_other_variables_is_refused() -> None:
    x = {"x": np.ones((4, 3), "float32")}
    model = _Forgetful(2, name="two")
    model.compile("sgd", ["mse", "mse"])
    model(x)
    estimator = model_to_estimator(model)
    with pytest.raises(ValueError, match=r"A copy of 'two' has the variables .* with shapes"):
        next(estimator.predict(lambda: x))


class _OwnStep(keras.Model):
    def train_step(self, *args):
        return super().train_step(*args)


@pytest.mark.slow
def test_saved_model_is_read_with_its_state(tmp_path) -> None:
    x, y = _vectors()
    model = _classifier()
    _fit(model, x, y)
    path = tmp_path / "model.keras"
    model.save(path)
    estimator = model_to_estimator(keras_model_path=path, model_dir=tmp_path / "run")
    estimator.train(_input_fn(x, y, 1))
    _fit(model, x, y)
    assert estimator.model_dir == str(tmp_path / "run")
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    _assert_same_evaluation(estimator, _input_fn(x, y, 1), expected)


def test_folder_that_is_an_argument_comes_before_that_of_the_config(tmp_path) -> None:
    config = RunConfig(model_dir=str(tmp_path / "config"), save_summary_steps=7)
    estimator = model_to_estimator(_classifier(), model_dir=tmp_path / "own", config=config)
    assert estimator.model_dir == str(tmp_path / "own")
    assert estimator.config.save_summary_steps == 7


def _compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model


def _own_step() -> keras.Model:
    inputs = layers.Input((2,))
    return _compiled(_OwnStep(inputs, layers.Dense(1)(inputs)))


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (ValueError, dict, "model_to_estimator received keras_model="),
        (
            ValueError,
            lambda: {"keras_model": _classifier(), "keras_model_path": "model.keras"},
            "model_to_estimator received keras_model=",
        ),
        (
            TypeError,
            lambda: {"keras_model": "model.keras"},
            r"keras_model='model\.keras' is of type str",
        ),
        (
            ValueError,
            lambda: {"keras_model": keras.Sequential([layers.Dense(1)], name="plain")},
            "The Keras model 'plain' is not compiled",
        ),
        (ValueError, lambda: {"keras_model": _compiled(_NotDescribed(1))}, "cannot be copied"),
        (
            ValueError,
            lambda: {"keras_model": _own_step()},
            r"overrides \['train_step'\]; an Estimator never",
        ),
        (
            ValueError,
            lambda: {"keras_model": _classifier(), "checkpoint_format": "h5"},
            "received checkpoint_format=",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(error, given, message) -> None:
    with pytest.raises(error, match=message):
        model_to_estimator(**given())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric_names_map": {"loss": "cost"}}, r"metric_names_map has the names \['loss'\]"),
        ({"export_outputs": {"age": dict}}, r"export_outputs received the unknown names \['age'\]"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(given, message) -> None:
    x, y = _vectors()
    estimator = model_to_estimator(_classifier(), checkpoint_format="saver", **given)
    with pytest.raises(ValueError, match=message):
        estimator.evaluate(lambda: (x, y))


@pytest.mark.slow
def test_export_has_a_signature_for_each_named_output(tmp_path) -> None:
    model = _two_headed(named=True)
    outputs = {"age": export.RegressionOutput, "kind": export.ClassificationOutput}
    estimator = model_to_estimator(model, export_outputs=outputs)
    receiver = export.build_raw_serving_input_receiver_fn(
        {"a": layers.Input((3,)), "b": layers.Input((2,))}
    )
    exported = load_exported(estimator.export_saved_model(tmp_path, receiver))

    x = {"a": np.ones((5, 3), "float32"), "b": np.ones((5, 2), "float32")}
    expected = model.predict(x, verbose=0)
    got = {
        "age": exported.signatures["age"](**x)["outputs"],
        "kind": exported.signatures["kind"](**x)["scores"],
    }
    for values in (got, exported.signatures["serving_default"](**x)):
        for name in outputs:
            np.testing.assert_allclose(values[name], expected[name], rtol=1e-5, atol=1e-6)


# Conversion of batches to Keras inputs and of outputs to names.

A, B, C = (np.full((2, 1), value, "float32") for value in (1, 2, 3))


def _functional(*, inputs: str = "list", outputs: str = "list") -> keras.Model:
    a, b = layers.Input((1,), name="a"), layers.Input((1,), name="b")
    sums = [layers.Add(name="sum")([a, b]), layers.Subtract(name="difference")([a, b])]
    given = {"list": [a, b], "dict": {"b": b, "a": a}}[inputs]
    made = {"list": sums, "dict": {"more": sums[0], "less": sums[1]}, "one": sums[0]}[outputs]
    return keras.Model(given, made)


def _sequential() -> keras.Model:
    return keras.Sequential([layers.Dense(2), layers.Dense(1, name="last")])


class _KerasBatchesSubclassed(keras.Model):
    def call(self, x: Any) -> Any:
        return x


def test_weights_travel_among_features() -> None:
    assert split_weights({"features": A, "sample_weights": B}) == (A, B)
    for plain in (A, {"features": A}, {"features": A, "sample_weights": B, "c": C}):
        assert split_weights(plain) == (plain, None)


def _of_one_input(*, listed: bool = False) -> keras.Model:
    single = layers.Input((1,))
    return keras.Model([single] if listed else single, layers.Dense(1)(single))


@pytest.mark.parametrize(
    ("model", "features", "expected"),
    [
        (_functional(), {"b": B, "other": C, "a": A}, [A, B]),
        (_functional(), [B, A], [B, A]),
        (_functional(inputs="dict"), {"b": B, "other": C, "a": A}, {"a": A, "b": B}),
        (_sequential(), {"any": A}, A),
        (_of_one_input(), {"any": A}, A),
        (_of_one_input(listed=True), {"any": A}, [A]),
        (_KerasBatchesSubclassed(), {"a": A, "b": B}, {"a": A, "b": B}),
    ],
)
def test_features_have_the_structure_of_the_inputs(model, features, expected) -> None:
    assert [inputs_of(model, features)] == [expected]  # the arrays themselves


@pytest.mark.parametrize(
    ("outputs", "values", "expected"),
    [
        ("list", {"difference": B, "sum": A}, [A, B]),
        ("one", {"sum": A}, A),
        ("list", [A, B], [A, B]),
        ("list", None, None),
        ("dict", {"less": B, "more": A}, {"more": A, "less": B}),
    ],
)
def test_labels_have_the_structure_of_the_outputs(outputs, values, expected) -> None:
    made = {"list": [C, C], "one": C, "dict": {"more": C, "less": C}}[outputs]
    assert [targets_of(_functional(outputs=outputs), made, values, "labels")] == [expected]


def test_names_that_are_missing_or_unknown_are_refused() -> None:
    model = _functional()
    assert targets_of(model, [C, C], {"difference": B}, "sample_weights") == [None, B]
    for words, call in (
        (
            r"features has .* \['a', 'c'\] but lacks \['b'\]",
            lambda: inputs_of(model, {"a": A, "c": C}),
        ),
        (
            r"labels has the names \['sum'\] but lacks",
            lambda: targets_of(model, [C, C], {"sum": A}, "labels"),
        ),
        (
            r"sample_weights received the unknown names \['total'\]",
            lambda: targets_of(model, [C, C], {"total": B}, "sample_weights"),
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize(
    ("model", "outputs", "names"),
    [
        (_functional(), [A, B], ["sum", "difference"]),
        (_functional(outputs="one"), A, ["sum"]),
        (_functional(outputs="dict"), {"more": A, "less": B}, ["more", "less"]),
        (_sequential(), A, ["last"]),
        (_KerasBatchesSubclassed(), (A, B), ["output_1", "output_2"]),
    ],
    ids=["functional", "one output", "dict", "sequential", "subclassed"],
)
def test_outputs_have_names(model: keras.Model, outputs: Any, names: list[str]) -> None:
    assert output_names(model, outputs) == names
    assert list(outputs_by_name(model, outputs)) == names
    assert outputs_by_name(model, outputs)[names[0]] is A


# Copies of compiled Keras models.


X = np.arange(12, dtype="float32").reshape(4, 3)
Y = X[:, :1]


@keras.saving.register_keras_serializable(package="tests")
class _Shift(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + 1


def _model(*, dropout: float = 0.0) -> keras.Model:
    inputs = layers.Input((3,), name="numbers")
    hidden = layers.Dropout(dropout)(_Shift()(inputs))
    hidden = layers.Dense(4, kernel_regularizer="l2")(hidden)
    model = keras.Model(inputs, layers.Dense(1, name="sum")(hidden))
    model.compile(keras.optimizers.Adam(0.5), "mse", metrics=[keras.metrics.MeanSquaredError()])
    return model


def _function(model: keras.Model) -> KerasModelFunction:
    return KerasModelFunction(model, None, None, None)


def test_what_is_sent_makes_no_variable_before_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable would initialize JAX before the processes connect."""
    sent = cloudpickle.dumps(_function(_model()))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(keras.Variable, "__init__", fail)
        with pytest.raises(AssertionError):
            keras.optimizers.Adam()
        received = cloudpickle.loads(sent)
    assert float(received(X, Y, "train").loss) > 0


def test_spec_of_training_has_the_loss_of_the_model_and_a_copy_of_its_optimizer() -> None:
    model = _model()
    function = _function(model)
    model.optimizer.learning_rate = 0.25  # too late
    spec = function(X, Y, "train")
    copy = spec.train_op.variables
    assert [tuple(one.shape) for one in copy] == [tuple(v.shape) for v in model.trainable_variables]
    optimizer = spec.train_op.optimizer
    assert optimizer is not model.optimizer
    assert float(optimizer.learning_rate) == 0.5
    spec.scaffold.init_fn(None)  # now the copy has the weights of the model
    for one, given in zip(copy, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), given.numpy())
    assert sorted(spec.predictions) == ["sum"]
    assert not spec.eval_metric_ops

"""Exports predict the same values as the Estimator, for any batch size."""

from __future__ import annotations

import json
import os
import time

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator import export as exporting
from tests.unit.estimator.model_functions import (
    classifier,
    convolutional_layers,
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)

export = sg.estimator.export
X, Y = examples(19)
DATA = dataset_of(X, Y, 4)
RAW = export.build_raw_serving_input_receiver_fn(jax.ShapeDtypeStruct((1, 5), "float32"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = estimator_of(
        dense_classifier, tmp_path_factory.mktemp("model"), strategy, save_checkpoints_steps=2
    )
    return estimator.train(DATA)


def predictions(estimator, name, data=DATA):
    return np.stack([row[name] for row in estimator.predict(data)])


@pytest.mark.slow
def test_predictions_are_those_of_the_estimator_for_any_batch(trained, tmp_path) -> None:
    assets = tmp_path / "words.txt"
    assets.write_text("a\nb\n")
    before_s = time.time()
    folder = trained.export_saved_model(
        tmp_path / "exports", RAW, assets_extra={"deep/words.txt": str(assets)}, as_text=True
    )
    assert os.path.dirname(folder) == str(tmp_path / "exports")
    assert before_s - 1 <= int(os.path.basename(folder)) <= time.time() + 1
    model = sg.estimator.load_exported(folder)
    assert list(model) == list(model.signatures) == ["serving_default"]
    serve = model["serving_default"]
    assert (serve.inputs["input"].shape, serve.inputs["input"].dtype) == ((None, 5), "float32")
    assert serve.outputs == ("logits", "classes")
    for count in (19, 1, 4):
        outputs = serve(X[:count].astype("float64"))
        np.testing.assert_allclose(
            outputs["logits"], predictions(trained, "logits")[:count], atol=1e-5
        )
        assert outputs["classes"].tolist() == predictions(trained, "classes")[:count].tolist()
    assert (tmp_path / folder / "assets.extra/deep/words.txt").read_text() == "a\nb\n"
    texts = [name for name in os.listdir(folder) if name.endswith(".mlir")]
    assert len(texts) == 1
    assert "stablehlo" in (tmp_path / folder / texts[0]).read_text()


def test_loaded_export_is_shown_in_a_line(trained, tmp_path) -> None:
    model = sg.estimator.load_exported(trained.export_saved_model(tmp_path, RAW))
    text = "Signature(name='serving_default', inputs={'input': InputSpec(shape=(None, 5), "
    assert repr(model).startswith(f"{{'serving_default': {text}")
    assert len(repr(model)) < 200


def test_an_earlier_checkpoint_and_two_exports_in_a_second(trained, tmp_path) -> None:
    path = os.path.join(trained.model_dir, "model.ckpt-2")
    folders = [
        trained.export_saved_model(tmp_path, RAW, checkpoint_path=one) for one in (path, None)
    ]
    assert len(set(folders)) == 2
    early, late = (sg.estimator.load_exported(one)["serving_default"](X) for one in folders)
    earlier = [row["logits"] for row in trained.predict(DATA, checkpoint_path=path)]
    np.testing.assert_allclose(early["logits"], earlier, atol=1e-5)
    np.testing.assert_allclose(late["logits"], predictions(trained, "logits"), atol=1e-5)
    assert np.abs(early["logits"] - late["logits"]).max() > 1e-4
    assert not any(name.startswith("temp") for name in os.listdir(tmp_path))


def test_signatures_and_features_that_are_computed(tmp_path) -> None:
    def model_fn(features, labels, mode):
        values = keras.layers.Dense(3)(features["a"]) + features["b"]
        if mode == "infer":
            outputs = {
                "serving_default": export.ClassificationOutput(scores=keras.ops.softmax(values)),
                "regress": export.RegressionOutput(values[:, 0]),
                "predict": export.PredictOutput(values),
            }
            return sg.estimator.EstimatorSpec(mode, predictions=values, export_outputs=outputs)
        loss = keras.ops.mean(values**2)
        return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.1))

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(6, 4)).astype("float32"), rng.normal(size=(6, 1)).astype("float32")
    data = lambda: sg.input.Dataset({"a": a, "b": b}, batch_size=3)  # noqa: E731
    estimator = estimator_of(model_fn, tmp_path).train(data)

    def receiver_fn():
        pixels = keras.Input((4,), dtype="uint8", name="pixels")
        offset = keras.Input((1,), name="offset")
        features = {"a": keras.ops.cast(pixels, "float32") / 255.0, "b": offset}
        return export.ServingInputReceiver(features, {"pixels": pixels, "offset": offset})

    model = sg.estimator.load_exported(estimator.export_saved_model(tmp_path / "e", receiver_fn))
    pixels = rng.integers(0, 256, (6, 4)).astype("uint8")
    same = lambda: sg.input.Dataset(  # noqa: E731
        {"a": pixels.astype("float32") / np.float32(255), "b": b}, batch_size=6
    )
    expected = np.stack(list(estimator.predict(same)))
    outputs = {name: one(pixels=pixels, offset=b) for name, one in model.items()}
    np.testing.assert_allclose(outputs["predict"]["output"], expected, atol=1e-5)
    np.testing.assert_allclose(outputs["regress"]["outputs"], expected[:, 0], atol=1e-5)
    softmax = np.exp(expected) / np.exp(expected).sum(-1, keepdims=True)
    np.testing.assert_allclose(outputs["serving_default"]["scores"], softmax, atol=1e-5)
    by_dict = model["predict"]({"pixels": pixels, "offset": b})
    np.testing.assert_array_equal(by_dict["output"], outputs["predict"]["output"])


@pytest.mark.slow
def test_a_convolutional_network_for_any_batch(tmp_path) -> None:
    x, y = examples(8, (6, 6, 2))
    layers = lambda: convolutional_layers(synchronized=False, dropout=0.5)  # noqa: E731
    estimator = estimator_of(classifier(layers, lambda: keras.optimizers.SGD(0.1)), tmp_path)
    estimator.train(dataset_of(x, y, 4))
    receiver_fn = export.build_raw_serving_input_receiver_fn({"x": x})
    receiver = receiver_fn()
    assert receiver.inputs["x"].shape == (None, 6, 6, 2)

    def sole():
        spec = keras.Input((6, 6, 2), name="x")
        return export.ServingInputReceiver(spec, {"x": spec})

    serve = sg.estimator.load_exported(estimator.export_saved_model(tmp_path / "e", sole))
    expected = predictions(estimator, "logits", dataset_of(x, y, 8))
    for count in (8, 3):
        outputs = serve["serving_default"](x[:count])
        np.testing.assert_allclose(outputs["logits"], expected[:count], atol=1e-5)


def test_a_size_that_the_model_function_needs_may_be_fixed(tmp_path) -> None:
    def model_fn(features, labels, mode):
        values = keras.layers.Dense(1)(features)
        if mode == "infer":
            rows = np.zeros(features.shape[0], "float32")  # a number, which any size is not
            return sg.estimator.EstimatorSpec(mode, predictions=values + rows[:, None])
        loss = keras.ops.mean(values)
        return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD())

    estimator = estimator_of(model_fn, tmp_path)
    estimator.train(lambda: sg.input.Dataset(X, batch_size=4), steps=1)
    with pytest.raises(ValueError, match="cannot be exported for arbitrary batch sizes"):
        estimator.export_saved_model(tmp_path / "e", RAW)
    spec = jax.ShapeDtypeStruct((1, 5), "float32")
    fixed = export.build_raw_serving_input_receiver_fn(spec, default_batch_size=4)
    folder = estimator.export_saved_model(tmp_path / "e", fixed)
    serve = sg.estimator.load_exported(folder)["serving_default"]
    assert serve.inputs["input"].shape == (4, 5)
    assert serve(X[:4])["output"].shape == (4, 1)


def test_other_outputs_are_refused(tmp_path) -> None:
    def model_fn(features, labels, mode):
        values = keras.layers.Dense(1)(features)
        return sg.estimator.EstimatorSpec(
            mode,
            predictions=values,
            loss=keras.ops.mean(values),
            train_op=keras.optimizers.SGD(),
            export_outputs={"serving_default": values},
        )

    estimator = estimator_of(model_fn, tmp_path)
    estimator.train(lambda: sg.input.Dataset(X, batch_size=4), steps=1)
    with pytest.raises(TypeError, match="a PredictOutput, ClassificationOutput or"):
        estimator.export_saved_model(tmp_path / "e", RAW)


def test_a_folder_is_taken_only_when_it_is_free(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(exporting.time, "time", lambda: 100.0)
    (tmp_path / "100").mkdir()
    (tmp_path / "temp-101").mkdir()
    assert exporting._make_temporary_folder(str(tmp_path)) == [str(tmp_path / "temp-102"), "102"]


# ServingInputReceiver and the functions that build it.


def test_raw_inputs_take_any_batch_by_default() -> None:
    features = {"x": np.zeros((7, 3), "int32"), "y": jax.ShapeDtypeStruct((1,), "float32")}
    make = export.build_raw_serving_input_receiver_fn
    shapes = {name: (one.shape, one.dtype) for name, one in make(features)().inputs.items()}
    assert shapes == {"x": ((None, 3), "int32"), "y": ((None,), "float32")}
    assert make(features, 2)().inputs["x"].shape == (2, 3)


def test_features_are_inputs_or_computed_of_them() -> None:
    x = keras.Input((2,), name="x")
    receiver = export.ServingInputReceiver({"one": x, "double": x * 2}, {"x": x})
    value = np.ones((3, 2), "float32")
    features = receiver.features_of({"x": value})
    assert features["one"] is value
    assert np.asarray(features["double"]).tolist() == [[2.0, 2.0]] * 3


def test_features_of_other_inputs_are_refused() -> None:
    values, x = {"x": np.ones((1, 2), "float32")}, keras.Input((2,))
    receiver = export.ServingInputReceiver(keras.Input((2,)), {"x": x})
    with pytest.raises(ValueError, match="Features cannot be computed by Keras"):
        receiver.features_of(values)
    receiver = export.ServingInputReceiver(jax.ShapeDtypeStruct((1, 2), "float32"), {"x": x})
    with pytest.raises(ValueError, match="receiver_tensors: a feature is not an input"):
        receiver.features_of(values)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda e: e.export_saved_model("a", lambda: {"x": X}),
            TypeError,
            r"serving_input_receiver_fn=[\s\S]* is of type",
        ),
        (
            lambda e: e.export_saved_model("a", RAW, experimental_mode="train"),
            NotImplementedError,
            "experimental_mode='train'",
        ),
        (
            lambda _: export.ServingInputReceiver(np.ones(3), np.ones(3)),
            TypeError,
            "An input of ServingInputReceiver=",
        ),
        (
            lambda _: export.ServingInputReceiver(
                keras.Input((2,)), keras.Input((2,)), {"other": keras.Input((2,))}
            ),
            NotImplementedError,
            "receiver_tensors_alternatives=.* is not supported",
        ),
        (
            lambda _: export.ClassificationOutput(),
            ValueError,
            "ClassificationOutput received neither scores nor classes",
        ),
    ],
    ids=range(5),
)
def test_what_cannot_be_exported_is_refused(trained, call, error, words) -> None:
    with pytest.raises(error, match=words):
        call(trained)


# Exported models: folders and calls that are refused.


def test_what_is_no_export_is_refused(trained, tmp_path) -> None:
    with pytest.raises(ValueError, match="contains no exported model"):
        sg.estimator.load_exported(tmp_path)
    folder = trained.export_saved_model(tmp_path, RAW)
    serve = sg.estimator.load_exported(folder)["serving_default"]
    for call in (lambda: serve(x=X), lambda: serve(X, X), serve):
        with pytest.raises(ValueError, match="The signature 'serving_default' was called with"):
            call()
    file = tmp_path / folder / "signatures.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    with pytest.raises(ValueError, match="was exported by another version"):
        sg.estimator.load_exported(folder)


# Outputs of exported signatures, by TensorFlow's names.


def test_outputs_by_the_names_of_tensorflow() -> None:
    assert export.PredictOutput(1).outputs == {"output": 1}
    assert export.PredictOutput({"a": 1}).outputs == {"a": 1}
    assert export.RegressionOutput(1).outputs == {"outputs": 1}
    assert export.ClassificationOutput(scores=1).outputs == {"scores": 1}
    assert export.ClassificationOutput(1, 2).outputs == {"scores": 1, "classes": 2}

"""Summaries of weights, embeddings and the graph of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.execution.summary.events import Read

NUM_ROWS, BATCH_SIZE, EPOCHS = 40, 8, 2

X = np.random.default_rng(0).random((NUM_ROWS, 4), np.float32)
Y = X.sum(axis=1, keepdims=True)

STRATEGIES = {
    "none": lambda: None,
    "one_device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "all_in_parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "central_storage": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def build(strategy: Any = None, layers: Any = None, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(0)

    def make() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((4,)), *(layers or [keras.layers.Dense(1)])])
        model.compile("sgd", "mse", metrics=["mae"], **compiled)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> dict[str, list[float]]:
    given = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "verbose": 0, "shuffle": False} | options
    return model.fit(X, Y, callbacks=[*callbacks], **given).history


@pytest.mark.parametrize(
    "name", [pytest.param("none", marks=pytest.mark.slow), "mirrored", "all_in_parts"]
)
def test_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    layers = [keras.layers.Dense(6, name="wide"), keras.layers.Dense(1, name="out")]
    model = build(STRATEGIES[name](), layers)
    fit(model, sg.TensorBoard(tmp_path, histogram_freq=2, write_images=True), epochs=3)
    train = Read(tmp_path / "train")
    assert sum(tag.endswith("/histogram") for tag in train.tags) == 4
    for weight in model.weights:
        ((_, first), (step, table)) = train.tensors(f"{weight.path}/histogram")
        value = np.asarray(weight.value, np.float64)
        counts, edges = np.histogram(value, bins=30)
        assert step == 2
        assert first[:, 2].sum() == value.size
        if value.size > 1:
            np.testing.assert_array_equal(table[:, 2], counts)
            np.testing.assert_allclose(table[:, 0], edges[:-1], rtol=1e-9)
    kernel = np.asarray(model.layers[0].kernel.value)
    ((_, _), (_, (picture,))) = train.images(f"{model.layers[0].kernel.path}/image")
    np.testing.assert_array_equal(picture, (np.clip(kernel, 0, 1) * np.float32(255.5)).astype("u1"))


def test_images_of_weights_have_the_shapes_that_keras_gives_them(tmp_path: Path) -> None:
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(3, 2, name="conv"),
            keras.layers.Conv2D(5, 2, name="deep"),
            keras.layers.Flatten(),
            keras.layers.Dense(7, name="dense"),
        ]
    )
    model.compile("sgd", "mse")
    callback = sg.TensorBoard(tmp_path, histogram_freq=1, write_images=True)
    model.fit(np.zeros((2, 8, 8, 1)), np.zeros((2, 7)), callbacks=[callback], verbose=0)
    train = Read(tmp_path / "train")
    shapes = {
        tag.split("/", 1)[1]: [one.shape for one in train.images(tag)[0][1]]
        for tag in train.tags
        if tag.endswith("/image")
    }
    assert shapes == {
        "conv/kernel/image": [(2, 2)] * 3,
        "conv/bias/image": [(3, 1)],
        "deep/bias/image": [(5, 1)],
        "dense/kernel/image": [(7, 180)],
        "dense/bias/image": [(7, 1)],
    }


def test_graph_is_the_model_as_json(tmp_path: Path) -> None:
    model = build()
    fit(model, sg.TensorBoard(tmp_path, write_graph=True), epochs=1)
    train = Read(tmp_path / "train")
    assert train.plugin("keras") == "graph_keras_model"
    assert json.loads(train.tensors("keras")[0][1].item()) == json.loads(model.to_json())


def test_embeddings_are_written_for_the_projector(tmp_path: Path) -> None:
    from google.protobuf import text_format
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    strategy = STRATEGIES["all_in_parts"]()
    table = keras.layers.Embedding(5, 2, name="words")
    layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = build(strategy, layers)
    callback = sg.TensorBoard(
        tmp_path, embeddings_freq=1, embeddings_metadata={"words": "words.txt"}
    )
    model.fit(np.zeros((4, 4), np.int32), np.zeros((4, 1)), callbacks=[callback], verbose=0)
    text = (tmp_path / "projector_config.pbtxt").read_text()
    (told,) = text_format.Parse(text, ProjectorConfig()).embeddings
    assert (told.tensor_name, told.metadata_path) == ("words", "words.txt")
    rows = np.loadtxt(tmp_path / told.tensor_path, delimiter="\t")
    np.testing.assert_allclose(rows, np.asarray(table.embeddings.value), rtol=1e-5)
    wrong = sg.TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata={"word": "words.txt"})
    with pytest.raises(
        ValueError, match="embeddings_metadata names layers that are not embeddings"
    ):
        model.fit(np.zeros((4, 4), np.int32), np.zeros((4, 1)), callbacks=[wrong], verbose=0)

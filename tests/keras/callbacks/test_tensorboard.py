"""sg.TensorBoard writes what Keras's own callback would, and what layers write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.summary.events import Read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NUM_ROWS, BATCH_SIZE, EPOCHS = 40, 8, 2
STEPS = NUM_ROWS // BATCH_SIZE
X = np.random.default_rng(0).random((NUM_ROWS, 4), np.float32)
Y = X.sum(axis=1, keepdims=True)
STRATEGIES = {
    "none": lambda: None,
    "one_device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "all_in_parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "central_storage": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


class Noting(keras.layers.Layer):
    """Writes the sum of the first row that it sees."""

    def call(self, x: Any) -> Any:
        sg.summary.scalar("first_row", keras.ops.sum(x[0]))
        return x


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


@pytest.mark.parametrize("name", STRATEGIES)
def test_epochs_are_those_of_the_history(name: str, tmp_path: Path) -> None:
    model = build(STRATEGIES[name]())
    history = fit(model, sg.TensorBoard(tmp_path), validation_data=(X[:8], Y[:8]))
    train, validation = Read(tmp_path / "train"), Read(tmp_path / "validation")
    assert train.tags == ["epoch_learning_rate", "epoch_loss", "epoch_mae"]
    assert train.numbers("epoch_learning_rate") == [(e, pytest.approx(0.01)) for e in (0, 1)]
    for metric in ("loss", "mae"):
        assert train.numbers(f"epoch_{metric}") == [*enumerate(map(pytest.approx, history[metric]))]
        of_validation = [*map(pytest.approx, history[f"val_{metric}"])]
        assert validation.numbers(f"epoch_{metric}") == [*enumerate(of_validation)]
        assert validation.numbers(f"evaluation_{metric}_vs_iterations") == [
            (STEPS * (epoch + 1), value) for epoch, value in enumerate(of_validation)
        ]


@pytest.mark.parametrize("name", ["none", "mirrored", "all_in_parts"])
def test_batches_and_layers_are_written_each_few_steps(name: str, tmp_path: Path) -> None:
    class Logs(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(float(logs["loss"]))

    model, logs = build(STRATEGIES[name](), [Noting(), keras.layers.Dense(1)]), Logs()
    callback = sg.TensorBoard(tmp_path, update_freq=2, write_steps_per_second=True)
    fit(model, callback, logs, validation_data=(X[:24], Y[:24]))
    train, validation = Read(tmp_path / "train"), Read(tmp_path / "validation")
    steps = [2, 4, 6, 8, 10]
    assert train.numbers("batch_loss") == [(s, pytest.approx(logs.losses[s - 1])) for s in steps]
    first_rows = X[::BATCH_SIZE].sum(axis=1)
    assert train.numbers("first_row") == [
        (step, pytest.approx(first_rows[(step - 1) % STEPS], rel=1e-5)) for step in steps
    ]
    # Keras evaluates in batches of the same size: three of them, of which the second is written.
    assert validation.numbers("first_row") == [(2, pytest.approx(first_rows[1]))] * EPOCHS
    assert train.steps("batch_steps_per_second") == steps
    assert all(speed > 0 for _, speed in train.numbers("batch_steps_per_second"))
    assert train.steps("epoch_steps_per_second") == [0, 1]


def test_many_steps_of_a_call_write_each_and_a_second_fit_goes_on(tmp_path: Path) -> None:
    model = build(
        STRATEGIES["mirrored"](), [Noting(), keras.layers.Dense(1)], steps_per_execution=STEPS
    )
    callback = sg.TensorBoard(tmp_path, update_freq="batch")
    fit(model, callback, epochs=1)
    fit(model, callback, epochs=1)
    train = Read(tmp_path / "train")
    first_rows = X[::BATCH_SIZE].sum(axis=1)
    assert train.numbers("first_row") == [
        (step + 1, pytest.approx(first_rows[step % STEPS], rel=1e-5)) for step in range(2 * STEPS)
    ]
    assert train.steps("batch_loss") == [STEPS, 2 * STEPS]


def test_layers_write_nothing_where_only_epochs_are_wanted(tmp_path: Path) -> None:
    model = build(STRATEGIES["mirrored"](), [Noting(), keras.layers.Dense(1)])
    fit(model, sg.TensorBoard(tmp_path))
    assert "first_row" not in Read(tmp_path / "train").tags


@pytest.mark.parametrize("name", ["none", "mirrored", "all_in_parts"])
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


def test_batches_are_profiled(tmp_path: Path) -> None:
    model = build(STRATEGIES["mirrored"]())
    fit(model, sg.TensorBoard(tmp_path, profile_batch=(2, 3)))
    (folder,) = (tmp_path / "train" / "plugins" / "profile").iterdir()
    assert list(folder.glob("*.xplane.pb"))


def test_evaluation_alone_is_written(tmp_path: Path) -> None:
    model = build(STRATEGIES["mirrored"]())
    fit(model, epochs=1)
    logs = model.evaluate(X, Y, callbacks=[sg.TensorBoard(tmp_path)], verbose=0, return_dict=True)
    assert Read(tmp_path / "validation").numbers("evaluation_loss_vs_iterations") == [
        (STEPS, pytest.approx(logs["loss"]))
    ]


def test_train_step_of_ones_own_writes(tmp_path: Path) -> None:
    class Model(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            x, _ = data
            sg.summary.scalar("largest", keras.ops.max(x))
            return super().train_step(state, data)

    with STRATEGIES["mirrored"]().scope():
        model = Model([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    fit(model, sg.TensorBoard(tmp_path, update_freq=1), epochs=1)
    halves = X.reshape(STEPS, 2, -1)[:, 0]  # replica 0 has the first half of a batch
    assert Read(tmp_path / "train").numbers("largest") == [
        (step + 1, pytest.approx(half.max())) for step, half in enumerate(halves)
    ]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for update_freq in ("epochs", 0, True, 1.5):
        with pytest.raises(ValueError, match=r"sg\.TensorBoard received update_freq="):
            sg.TensorBoard(tmp_path, update_freq=update_freq)
    for profile_batch in (-1, (3, 2), "a", (1, 2, 3), None):
        with pytest.raises(ValueError, match=r"sg\.TensorBoard received profile_batch="):
            sg.TensorBoard(tmp_path, profile_batch=profile_batch)
    for freq in ("histogram_freq", "embeddings_freq"):
        for value in (-1, True, False):
            with pytest.raises(ValueError, match=rf"sg\.TensorBoard received {freq}={value}"):
                sg.TensorBoard(tmp_path, **{freq: value})


def test_words_for_batches_are_those_of_keras(tmp_path: Path) -> None:
    assert sg.TensorBoard(tmp_path, profile_batch="2,4").needs_batch_logs
    assert sg.TensorBoard(tmp_path, update_freq="batch").update_freq == 1
    assert not sg.TensorBoard(tmp_path).needs_batch_logs

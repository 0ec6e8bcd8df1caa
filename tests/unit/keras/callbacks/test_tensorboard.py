"""sg.TensorBoard writes what Keras's own callback would, and what layers write."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.callbacks import tensorboard
from tests.unit.execution.summary.events import Read
from tests.unit.observe.run_events.test_wait_clock import ticking

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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name not in {"one_device", "central_storage"} else pytest.mark.slow
        )
        for name in STRATEGIES
    ],
)
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
def test_batches_and_layers_are_written_each_few_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "time", ticking())

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


def test_clock_that_is_coarser_than_a_step_writes_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "time", types.SimpleNamespace(perf_counter=lambda: 7.0))
    model = build(STRATEGIES["none"]())
    fit(model, sg.TensorBoard(tmp_path, update_freq=1, write_steps_per_second=True))
    tags = Read(tmp_path / "train").tags
    assert "batch_loss" in tags
    assert not [tag for tag in tags if "per_second" in tag]


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

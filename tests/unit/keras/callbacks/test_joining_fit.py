"""`fit` of a process that joins another's: it ends with the values of the one that was not joined.

Both run in this process, one after the other, with an admission that is made up.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.keras.callbacks import tensorboard
from stratagem.keras.callbacks.backup_and_restore import JoiningFit
from stratagem.keras.training.step_functions import TrainOrTestFunction
from tests.unit.execution.summary.events import Read
from tests.unit.keras.callbacks.backups import assert_same, values
from tests.unit.observe.test_wait_clock import ticking

_EPOCHS, _NUM_BATCHES, _BATCH = 3, 4, 8
_X = np.random.default_rng(0).random((_NUM_BATCHES * _BATCH - 3, 4)).astype(np.float32)
_Y = _X.sum(1)


def _set(model: Any, given: list[np.ndarray]) -> None:
    for variable, value in zip([*model.variables, *model.optimizer.variables], given, strict=True):
        variable.assign(value)


class _Admission:
    """Admission of a member, or of a process that joins with what `receive` returns."""

    def __init__(self, model: Any, receive: Callable[[], Any] | None = None) -> None:
        self._model, self._receive = model, receive
        self.is_waiting = receive is not None
        self.calls: list[Any] = []
        self.states: list[tuple[str, list[np.ndarray]]] = []
        self._values: list[np.ndarray] = []

    def begin_call(self) -> str:
        return "fit:1"

    def admit(self, place: str, state: Callable[[], Any], *, may_retry: bool) -> None:
        self.calls.append((place, may_retry))
        self.states.append((json.dumps(state()), values(self._model)))

    def join(self, place: str, prepare: Callable[[], None]) -> Any:
        assert self._receive is not None
        prepare()
        self.calls.append(place)
        self.is_waiting = False
        received = self._receive()
        if received is None:
            return None
        text, self._values = received
        return json.loads(text)

    def restore(self) -> None:
        self.calls.append("restore")
        _set(self._model, self._values)

    def end_place(self) -> None:
        self.calls.append("end")


@pytest.fixture(scope="module")
def made() -> tuple[Any, list[np.ndarray]]:
    """A compiled model that has trained a step, and its values."""
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dropout(0.3, seed=1), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01, 0.9), "mse")
    model.fit(_X, _Y, _BATCH, verbose=0)
    return model, values(model)


def _fit(made: Any, admission: Any, *, seed: int = 4, **options: Any) -> dict[str, Any]:
    """Trains from the same values; returns the logs."""
    model, before = made
    _set(model, before)
    keras.utils.set_random_seed(seed)
    draw = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: np.random.random())
    options["callbacks"] = [draw, *options.get("callbacks", ()), JoiningFit(admission)]
    given = {"batch_size": _BATCH, "epochs": _EPOCHS, "verbose": 0, **options}
    return model.fit(_X, _Y, **given).history


@pytest.fixture(scope="module")
def whole(made) -> tuple[_Admission, list[np.ndarray], dict[str, Any]]:
    """A training that is not joined: its states before each batch, last values and logs."""
    admission = _Admission(made[0])
    logs = _fit(made, admission)
    return admission, values(made[0]), logs


def test_a_member_admits_before_each_batch_and_ends_its_place(whole) -> None:
    admission, _, _ = whole
    assert admission.calls == [("fit:1", True)] * _EPOCHS * _NUM_BATCHES + ["end"]
    positions = [json.loads(text) for text, _ in admission.states]
    assert [(one["epoch"], one["batch"]) for one in positions] == [
        (epoch, batch) for epoch in range(_EPOCHS) for batch in range(_NUM_BATCHES)
    ]


@pytest.mark.parametrize(
    "step",
    [0, 1, pytest.param(_NUM_BATCHES, marks=pytest.mark.compatibility), 2 * _NUM_BATCHES + 3],
)
def test_one_that_joins_ends_with_the_bits_of_the_others(made, whole, step) -> None:
    states, wanted, logs = whole[0].states, whole[1], whole[2]
    admission = _Admission(made[0], lambda: states[step])
    batches: list[int] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda b, logs: batches.append(b))
    joined = _fit(made, admission, seed=77, callbacks=[note])
    assert_same(values(made[0]), wanted)
    assert list(joined) == list(logs)
    for name in logs:
        done = step // _NUM_BATCHES
        assert joined[name][:done] == logs[name][:done]  # those of the other's `History`
        assert joined[name][done + 1 :] == logs[name][done + 1 :]
    assert len(batches) == _EPOCHS * _NUM_BATCHES - step
    assert admission.calls[:2] == ["fit:1", "restore"]
    assert admission.calls[-1] == "end"
    for (text, _), (expected, _) in zip(admission.states, states[step:], strict=True):
        for name in ("epoch", "batch", "random"):
            assert json.loads(text)[name] == json.loads(expected)[name]


def test_a_call_that_is_over_trains_nothing_and_the_next_one_all(made) -> None:
    model, before = made
    admission = _Admission(model, lambda: None)
    assert _fit(made, admission) == {}
    assert_same(values(model), before)
    assert admission.calls == ["fit:1", "end"]
    assert len(_fit(made, admission)["loss"]) == _EPOCHS


def test_a_state_of_other_data_and_members_that_end_first_are_errors(made, whole) -> None:
    admission = _Admission(made[0], lambda: whole[0].states[1])
    with pytest.raises(ValueError, match="saved at batch 1 of 4, but an epoch now has 2 batches"):
        _fit(made, admission, batch_size=2 * _BATCH)
    assert admission.calls[-1] == "end"

    def end() -> None:
        raise UnavailableError("All members ended before worker 1 could join them.")

    admission = _Admission(made[0], end)
    with pytest.raises(UnavailableError, match="All members ended before worker 1"):
        _fit(made, admission)
    assert admission.calls == ["fit:1", "end"]


class _Skipping(_Admission):
    """A call that is over. `seen` has what `look` returns before and after a batch is read."""

    def __init__(self, model: Any, look: Callable[[], Any]) -> None:
        super().__init__(model, lambda: None)
        self._look = look
        self.seen: list[Any] = []

    def begin_call(self) -> str:
        self.seen.append(self._look())
        return super().begin_call()

    def join(self, place: str, prepare: Callable[[], None]) -> Any:
        self.seen.append(self._look())
        return super().join(place, prepare)


@pytest.fixture
def skipped(monkeypatch) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Skips a call of `fit`; returns the batches of the compiled steps, and what it has seen."""
    batches: list[Any] = []
    monkeypatch.setattr(
        TrainOrTestFunction, "compile_ahead", lambda function, batch: batches.append(batch)
    )

    def skip(*data: Any, look: Callable[[], Any], **options: Any) -> tuple[list[Any], list[Any]]:
        with sg.OneDeviceStrategy("cpu:0").scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        admission = _Skipping(model, look)
        callbacks: list[Any] = [JoiningFit(admission)]
        model.fit(*data, epochs=2, verbose=0, callbacks=callbacks, **options)
        return batches, admission.seen

    return skip


def test_the_step_is_compiled_for_a_batch_of_the_data_whose_order_stays(skipped) -> None:
    (batch, last), draws = skipped(_X, _Y, _BATCH, look=lambda: np.random.get_state()[2])
    assert draws[0] == draws[1]
    assert [np.shape(one) for one in batch[:2]] == [(_BATCH, 4), (_BATCH,)]
    num_last = len(_X) % _BATCH
    assert num_last
    assert [np.shape(one) for one in last[:2]] == [(num_last, 4), (num_last,)]


def test_no_batch_is_read_from_data_that_cannot_be_read_again(skipped) -> None:
    num_read = 0

    def batches() -> Any:
        nonlocal num_read
        while True:
            num_read += 1
            yield _X[:_BATCH], _Y[:_BATCH]

    compiled, seen = skipped(batches(), look=lambda: num_read, steps_per_epoch=3, shuffle=False)
    assert compiled == []
    assert seen[0] == seen[1]


# sg.TensorBoard writes what Keras's own callback would, and what layers write.

NUM_ROWS, BATCH_SIZE, EPOCHS = 40, 8, 2
STEPS = NUM_ROWS // BATCH_SIZE
X = np.random.default_rng(0).random((NUM_ROWS, 4), np.float32)
Y = X.sum(axis=1, keepdims=True)
STRATEGIES = {
    "none": lambda: None,
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "all_in_parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
}


class Noting(keras.layers.Layer):
    """Writes the sum of the first row that it sees."""

    def call(self, x: Any) -> Any:
        sg.summary.scalar("first_row", keras.ops.sum(x[0]))
        return x


def build(strategy: Any = None, layers: Any = None, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), *(layers or [keras.layers.Dense(1)])])
        model.compile("sgd", "mse", metrics=["mae"], **compiled)
    return model


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> dict[str, list[float]]:
    given = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "verbose": 0, "shuffle": False} | options
    return model.fit(X, Y, callbacks=[*callbacks], **given).history


@pytest.mark.parametrize("name", ["none", "all_in_parts"])
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


@pytest.mark.parametrize("name", ["none", "mirrored"])
def test_batches_and_layers_are_written_each_few_steps(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensorboard, "time", ticking())

    losses: list[float] = []
    logs = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
    )
    model = build(STRATEGIES[name](), [Noting(), keras.layers.Dense(1)])
    callback = sg.TensorBoard(tmp_path, update_freq=2, write_steps_per_second=True)
    fit(model, callback, logs, validation_data=(X[:24], Y[:24]))
    train, validation = Read(tmp_path / "train"), Read(tmp_path / "validation")
    steps = [2, 4, 6, 8, 10]
    assert train.numbers("batch_loss") == [(s, pytest.approx(losses[s - 1])) for s in steps]
    first_rows = X[::BATCH_SIZE].sum(axis=1)
    assert train.numbers("first_row") == [
        (step, pytest.approx(first_rows[(step - 1) % STEPS], rel=1e-5)) for step in steps
    ]
    # Keras evaluates in batches of the same size: three of them, of which the second is written.
    assert validation.numbers("first_row") == [(2, pytest.approx(first_rows[1]))] * EPOCHS
    assert train.steps("batch_steps_per_second") == steps
    assert all(speed > 0 for _, speed in train.numbers("batch_steps_per_second"))
    assert train.steps("epoch_steps_per_second") == [0, 1]


def test_clock_that_is_coarser_than_a_step_writes_no_speed(tmp_path, monkeypatch) -> None:
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


def test_batches_are_profiled(tmp_path: Path) -> None:
    """And the graph and an evaluation alone are written; layers write nothing by default."""
    model = build(STRATEGIES["mirrored"](), [Noting(), keras.layers.Dense(1)])
    callback = sg.TensorBoard(tmp_path, profile_batch="2,3", write_graph=True)
    assert callback.needs_batch_logs
    assert not sg.TensorBoard(tmp_path).needs_batch_logs
    fit(model, callback, epochs=1)
    train = Read(tmp_path / "train")
    assert "first_row" not in train.tags
    assert train.plugin("keras") == "graph_keras_model"
    assert json.loads(train.tensors("keras")[0][1].item()) == json.loads(model.to_json())
    (folder,) = (tmp_path / "train" / "plugins" / "profile").iterdir()
    assert list(folder.glob("*.xplane.pb"))
    alone = sg.TensorBoard(tmp_path / "alone")
    logs = model.evaluate(X, Y, callbacks=[alone], verbose=0, return_dict=True)
    assert Read(tmp_path / "alone/validation").numbers("evaluation_loss_vs_iterations") == [
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
        for value, error in ((-1, ValueError), (True, TypeError), (False, TypeError)):
            with pytest.raises(error, match=rf"sg\.TensorBoard received {freq}={value}"):
                sg.TensorBoard(tmp_path, **{freq: value})


# Summaries of weights, embeddings and the graph of a model.


@pytest.mark.parametrize("name", [pytest.param("none", marks=pytest.mark.slow), "all_in_parts"])
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
    words = "embeddings_metadata names layers that are not embeddings"
    with pytest.raises(ValueError, match=words):
        model.fit(np.zeros((4, 4), np.int32), np.zeros((4, 1)), callbacks=[wrong], verbose=0)

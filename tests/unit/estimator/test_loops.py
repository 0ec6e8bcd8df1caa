"""Values that hooks fetch, and the order of their calls."""

from __future__ import annotations

import dataclasses
import logging
import math

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator import loops
from stratagem.estimator.inputs import InputFunction, ModelBatches
from stratagem.estimator.loops import FILE_NAME, read_eval_metrics, write_eval_metrics
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)
from tests.unit.estimator.read_scalars import read_scalars
from tests.unit.estimator.test_training import Losses, two_players

SessionRunArgs = sg.estimator.SessionRunArgs


class Recorder(sg.estimator.SessionRunHook):
    """Records its calls and fetches values in each step."""

    def __init__(self, fetches=None, stop_at=None) -> None:
        self.calls = []
        self.results = []
        self._fetches = fetches
        self._stop_at = stop_at

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, session, coord):
        self.calls.append(("created", session.global_step))
        self.session = session

    def before_run(self, run_context):
        self.calls.append(("before", run_context.session.global_step))
        return None if self._fetches is None else SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        step = run_context.session.global_step
        self.calls.append(("after", step))
        self.results.append(run_values.results)
        if step == self._stop_at:
            run_context.request_stop()

    def end(self, session):
        self.calls.append(("end", session.global_step))


X, Y = examples(16)
DATA = dataset_of(X, Y, 4)


@pytest.mark.slow
def test_hooks_are_called_in_the_order_of_tensorflow(tmp_path) -> None:
    hook = Recorder()
    estimator = estimator_of(dense_classifier, tmp_path)
    estimator.train(DATA, hooks=[hook], steps=2)
    assert hook.calls == [
        "begin",
        ("created", 0),
        ("before", 0),
        ("after", 1),
        ("before", 1),
        ("after", 2),
        ("end", 2),
    ]
    assert hook.results == [None, None]
    again = Recorder(stop_at=3)
    estimator.train(DATA, hooks=[again])  # goes on, until the hook asks for the end
    assert again.calls == ["begin", ("created", 2), ("before", 2), ("after", 3), ("end", 3)]
    assert estimator.get_variable_value("global_step") == 3


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_hooks_of_loops_that_do_not_train(name, tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path)
    estimator.train(DATA, steps=1)
    hook, early = Recorder(), Recorder(stop_at=1)
    list(getattr(estimator, name)(DATA, hooks=[hook]))
    steps = [("before", 1), ("after", 1)]
    assert hook.calls == ["begin", ("created", 1), *steps * 4, ("end", 1)]
    list(getattr(estimator, name)(DATA, hooks=[early]))
    assert early.calls == ["begin", ("created", 1), *steps, ("end", 1)]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_names_variables_and_values_of_the_model_function(num_replicas, tmp_path) -> None:
    made = []

    def model_fn(features, labels, mode):
        layer = keras.layers.Dense(1, name="layer", kernel_initializer="ones")
        product = layer(features)
        mean = sg.estimator.identity(keras.ops.mean(features), name="mean")
        sg.estimator.identity(features.shape[0], name="rows")
        loss = keras.ops.mean(product**2)
        hook = Recorder({"loss": loss, "mean": mean, "kernel": layer.kernel})
        hook.tensors = {"loss": loss, "mean": mean}
        made.append(hook)
        return sg.estimator.EstimatorSpec(
            mode, loss=loss, train_op=keras.optimizers.SGD(0.1), training_hooks=[hook]
        )

    x = np.arange(8, dtype="float32").reshape(4, 2)
    fetches = ["loss", "mean", "global_step", "layer/bias:0", {"rows": "rows"}]
    outside = Recorder(fetches)
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    estimator = estimator_of(model_fn, tmp_path, strategy)
    estimator.train(lambda: sg.input.Dataset(x, batch_size=4 // num_replicas), hooks=[outside])

    loss, mean, step, bias, rows = outside.results[0]
    assert loss == pytest.approx(np.mean(x.sum(1) ** 2))
    assert mean == pytest.approx(3.5)
    assert (step, step.dtype) == (1, np.int32)
    np.testing.assert_allclose(bias, -0.1 * 2 * x.sum(1).mean(keepdims=True), rtol=1e-6)
    assert rows == {"rows": 4 // num_replicas}
    used = next(hook for hook in made if hook.results)
    assert used.results[0]["loss"] == loss
    assert used.results[0]["mean"] == mean
    np.testing.assert_array_equal(
        used.results[0]["kernel"], estimator.get_variable_value("layer/kernel")
    )


def test_nothing_is_fetched_that_nobody_asks_for(tmp_path, monkeypatch) -> None:
    fetched = []
    original = loops.Session._fetch
    monkeypatch.setattr(
        loops.Session,
        "_fetch",
        lambda self, wanted: fetched.append(wanted) or original(self, wanted),
    )
    estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[Recorder()])
    assert fetched == []


def test_value_of_a_step_before_the_first_is_refused(tmp_path) -> None:
    class Early(sg.estimator.SessionRunHook):
        def after_create_session(self, session, coord):
            assert session.run("global_step") == 0
            session.run("loss")

    with pytest.raises(ValueError, match="A hook fetched 'loss' before the first step"):
        estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[Early()])


@pytest.mark.parametrize("is_of_spec", [True, False])
def test_hook_of_a_name_that_is_not_there_and_of_a_number(is_of_spec, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    names = {"rate": 0.1, "loss": "loss"}

    def train(tensors) -> None:
        hooks = [sg.estimator.LoggingTensorHook(tensors, every_n_iter=1)]

        def model_fn(features, labels, mode):
            spec = dense_classifier(features, labels, mode)
            return dataclasses.replace(spec, training_hooks=hooks if is_of_spec else ())

        estimator_of(model_fn, tmp_path).train(DATA, hooks=[] if is_of_spec else hooks, steps=1)

    train(names)
    assert any(line.endswith(", rate = 0.1") for line in caplog.messages)
    message = r"fetched 'norm'(?s:.)*one of \[.*'loss'(?s:.)*Fix: name it"
    with pytest.raises(ValueError, match=message):
        train({"norm": "norm"})


@pytest.mark.parametrize("wanted", ["no_such_name", b"loss"])
def test_what_no_step_gives_is_refused(wanted, tmp_path) -> None:
    with pytest.raises(ValueError, match="which the step does not return"):
        estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[Recorder(wanted)])
    with pytest.raises(ValueError, match="identity received name='loss'"):
        sg.estimator.identity(1.0, name="loss")


# Training and evaluation summaries that TensorBoard reads.

ROWS_32 = examples(32)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_losses_and_what_the_model_function_writes(num_replicas, tmp_path) -> None:
    def model_fn(features, labels, mode):
        sg.summary.scalar("first", features[0, 0])
        return dense_classifier(features, labels, mode)

    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    estimator = estimator_of(model_fn, tmp_path, strategy, save_summary_steps=3)
    losses = Losses()
    data = dataset_of(*ROWS_32, 4 // num_replicas)
    estimator.train(data, hooks=[losses])
    found = read_scalars(tmp_path)
    assert [step for step, _ in found["loss"]] == [1, 4, 7]
    assert [value for _, value in found["loss"]] == pytest.approx(losses.values[::3])
    assert found["first"] == [(step, ROWS_32[0][4 * (step - 1), 0]) for step in (1, 4, 7)]

    results = estimator.evaluate(data)
    evaluated = read_scalars(estimator.eval_dir())
    assert evaluated == {name: [(8, pytest.approx(results[name]))] for name in ("loss", "accuracy")}
    estimator.evaluate(data, name="again")
    assert read_scalars(tmp_path / "eval_again") == evaluated


def test_each_summary_is_written_once_however_often_the_function_is_called(tmp_path) -> None:
    def model_fn(features, labels, mode):
        sg.summary.scalar("one", 1.0)
        return two_players(features, labels, mode)

    estimator = estimator_of(model_fn, tmp_path, save_summary_steps=1)
    estimator.train(lambda: sg.input.Dataset(ROWS_32[0], batch_size=16))
    assert read_scalars(tmp_path)["one"] == [(1, 1.0), (2, 1.0)]


@pytest.mark.slow
def test_without_tensorboard_training_goes_on(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(loops.importlib.util, "find_spec", lambda name: None)
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    estimator = estimator_of(dense_classifier, tmp_path)
    estimator.train(dataset_of(*ROWS_32, 16))
    assert "pip install 'stratagem[observe]'" in caplog.text
    assert not list(tmp_path.glob("events*"))
    assert np.isfinite(estimator.evaluate(dataset_of(*ROWS_32, 16))["loss"])


# Host transforms encode each batch where it is read.


def upper(batch, mode):
    features, labels = batch if isinstance(batch, tuple) else (batch, None)
    return {"x": np.char.upper(features["x"]), "mode": np.array([mode])}, labels


ROWS = {"x": np.array(["a", "b", "c"])}
LABELS = np.arange(3)


def encoded(input_fn, mode):
    function = InputFunction(input_fn, mode, None, None, upper, repeats=False)
    return function(sg.InputContext())


def test_batch_of_a_dict_is_encoded_at_once() -> None:
    (batch,) = encoded(lambda: (ROWS, LABELS), "train")
    features, labels = batch
    assert features["x"].tolist() == ["A", "B", "C"]
    assert features["mode"].tolist() == ["train"]
    assert labels is LABELS
    _, labels = encoded(lambda: ROWS, "infer")
    assert labels is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.input.Dataset((ROWS, LABELS), batch_size=2),
        lambda: [
            ({"x": ROWS["x"][rows]}, LABELS[rows]) for rows in (slice(0, 2), slice(2, 3))
        ],
    ],
    ids=["dataset", "list"],
)  # fmt: skip
def test_batches_of_a_dataset_are_encoded_as_they_are_read(make) -> None:
    source = encoded(make, "eval")
    assert source.cardinality == 2
    reader = source.open(0)
    assert next(reader)[0]["x"].tolist() == ["A", "B"]
    again = source.open(0)
    again.restore(reader.state())
    assert [next(one)[0]["x"].tolist() for one in (reader, again)] == [["C"], ["C"]]
    reader.close()


# Batches of input functions.

STRATEGY = sg.OneDeviceStrategy("cpu:0")


def batches(input_fn, *, repeats=True):
    source = InputFunction(input_fn, "train", None, None, repeats=repeats)
    return ModelBatches(source, STRATEGY)


def test_features_and_labels_are_distinguished() -> None:
    x, y = np.arange(4.0, dtype="float32"), np.arange(4)
    pairs = list(batches(lambda: sg.input.Dataset((x, y), batch_size=2)))
    assert [(a.tolist(), b.tolist()) for a, b in pairs] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    alone = list(batches(lambda: sg.input.Dataset({"x": x}, batch_size=2)))
    assert [(sorted(a), b) for a, b in alone] == [(["x"], None)] * 2


def test_a_generator_is_a_dataset_and_arrays_are_a_batch() -> None:
    x = np.zeros((3, 2), "float32")
    assert len(list(batches(lambda: ((x, x) for _ in range(5))))) == 5
    assert len(list(batches(lambda: (x, x), repeats=False))) == 1
    endless = batches(lambda: {"x": x})
    assert [next(endless)[0]["x"].shape for _ in range(3)] == [(3, 2)] * 3
    endless.close()


def test_what_input_functions_may_not_return_is_refused() -> None:
    x = np.zeros(2, "float32")
    with pytest.raises(TypeError, match=r"input_fn=\[1\] is of type list"):
        batches([1])
    with pytest.raises(ValueError, match="input_fn returned batches of 3 elements"):
        next(batches(lambda: [(x, x, x)]))
    with pytest.raises(ValueError, match="input_fn returned an empty dataset"):
        batches(lambda: iter(())).first()


# Evaluation records in a folder.


def test_what_was_written_is_read_in_the_order_of_steps(tmp_path) -> None:
    folder = tmp_path / "model" / "eval"
    write_eval_metrics(folder, {"loss": np.float32(0.5), "global_step": np.int32(20)})
    write_eval_metrics(folder, {"loss": jnp.float32(1.5), "auc": 0.25, "global_step": 10})
    write_eval_metrics(folder, {"loss": 0.125, "global_step": 20})
    assert read_eval_metrics(folder) == {
        10: {"loss": 1.5, "auc": 0.25, "global_step": 10},
        20: {"loss": 0.125, "global_step": 20},
    }
    assert list(read_eval_metrics(folder)) == [10, 20]


def test_what_is_no_scalar_is_left_out_and_nan_is_kept(tmp_path) -> None:
    write_eval_metrics(tmp_path, {"m": np.eye(2), "loss": float("nan"), "global_step": 1})
    metrics = read_eval_metrics(tmp_path)[1]
    assert sorted(metrics) == ["global_step", "loss"]
    assert math.isnan(metrics["loss"])


def test_line_that_was_cut_short_is_passed_over(tmp_path) -> None:
    write_eval_metrics(tmp_path, {"loss": 1.0, "global_step": 1})
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"loss": 0.')
    assert list(read_eval_metrics(tmp_path)) == [1]

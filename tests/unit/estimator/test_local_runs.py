"""A real Estimator with hooks, exporters and in-memory input functions."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import estimator as est
from tests.unit.estimator.read_scalars import read_scalars

_RANDOM = np.random.default_rng(7)
X = _RANDOM.normal(size=(22, 3)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5], "float32") + 0.25).astype("float32")
TRAIN_X, TRAIN_Y, EVAL_X, EVAL_Y = X[:16], Y[:16], X[16:], Y[16:]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def linear_model(features, labels, mode, params):
    outputs = keras.layers.Dense(1, kernel_initializer="zeros")(features["x"])[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"y": outputs})
    # Unlike a plain mean it leaves out what pads a short batch.
    loss = keras.losses.MeanSquaredError()(labels[:, None], outputs[:, None])
    error = keras.metrics.MeanAbsoluteError()
    error.update_state(labels[:, None], outputs[:, None])
    optimizer = keras.optimizers.SGD(params["rate"])
    return est.EstimatorSpec(
        mode,
        loss=loss,
        train_op=est.minimize(optimizer, loss),
        eval_metric_ops={"mae": error},
        training_hooks=[
            est.LoggingTensorHook({"traced": loss * 2}, every_n_iter=params.get("log", 1000))
        ],
    )


def train_fn(batch_size=4, num_epochs=None):
    return est.numpy_input_fn({"x": TRAIN_X}, TRAIN_Y, batch_size, num_epochs, shuffle=False)


eval_fn = est.numpy_input_fn({"x": EVAL_X}, EVAL_Y, 4, shuffle=False)


def make(tmp_path, *, strategy=None, rate=0.1, log=1000, **settings) -> est.Estimator:
    config = est.RunConfig(
        str(tmp_path / "model"),
        save_checkpoints_steps=settings.pop("save_steps", 5),
        train_distribute=strategy,
        eval_distribute=strategy,
        **settings,
    )
    return est.Estimator(linear_model, config=config, params={"rate": rate, "log": log})


def weights_of(estimator) -> tuple[Any, Any]:
    values = [estimator.get_variable_value(name) for name in estimator.get_variable_names()]
    (kernel,) = [value for value in values if value.shape == (3, 1)]
    (bias,) = [value for value in values if value.shape == (1,)]
    return kernel, bias


def in_numpy(num_steps: int, batch_size: int, rate: float = 0.1) -> tuple[Any, Any]:
    """Runs gradient descent on the training data, in order."""
    kernel, bias = np.zeros(3), 0.0
    rows = np.tile(np.arange(len(TRAIN_X)), num_steps * batch_size // len(TRAIN_X) + 1)
    for step in range(num_steps):
        chosen = rows[step * batch_size : (step + 1) * batch_size]
        x, error = TRAIN_X[chosen], TRAIN_X[chosen] @ kernel + bias - TRAIN_Y[chosen]
        kernel = kernel - rate * 2 * x.T @ error / batch_size
        bias = bias - rate * 2 * error.mean()
    return kernel, bias


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_metrics_are_those_of_gradient_descent_in_numpy(tmp_path, num_replicas) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"]) if num_replicas == 2 else None
    estimator = make(tmp_path, strategy=strategy)
    metrics, exports = est.train_and_evaluate(
        estimator,
        est.TrainSpec(train_fn(), max_steps=12),
        est.EvalSpec(eval_fn, steps=None, throttle_secs=0),
    )
    kernel, bias = in_numpy(12, 4 * num_replicas)
    error = EVAL_X @ kernel + bias - EVAL_Y
    np.testing.assert_allclose(weights_of(estimator)[0][:, 0], kernel, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-4)
    np.testing.assert_allclose(metrics["mae"], np.mean(np.abs(error)), rtol=1e-4)
    assert (metrics["global_step"], exports) == (12, [])
    record = est.read_eval_metrics(estimator.eval_dir())
    assert list(record) == [5, 10, 12]
    np.testing.assert_allclose(record[12]["loss"], metrics["loss"])


def test_training_ends_with_the_data(tmp_path) -> None:
    estimator = make(tmp_path)
    spec = est.EvalSpec(eval_fn, steps=1, name="one", throttle_secs=3600)
    metrics, _ = est.train_and_evaluate(estimator, est.TrainSpec(train_fn(num_epochs=2)), spec)
    assert metrics["global_step"] == 8
    kernel, bias = in_numpy(8, 4)
    error = (EVAL_X @ kernel + bias - EVAL_Y)[:4]
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-4)
    assert list(est.read_eval_metrics(estimator.eval_dir("one"))) == [5, 8]


def test_early_stopping_ends_a_real_training(tmp_path) -> None:
    estimator = make(tmp_path, rate=0.3, save_steps=10)
    hook = est.stop_if_lower_hook(estimator, "loss", 0.01, run_every_secs=None, run_every_steps=1)
    metrics, _ = est.train_and_evaluate(
        estimator,
        est.TrainSpec(train_fn(batch_size=16), max_steps=10_000, hooks=[hook]),
        est.EvalSpec(eval_fn, throttle_secs=0),
    )
    below = [
        step
        for step, found in est.read_eval_metrics(estimator.eval_dir()).items()
        if found["loss"] < 0.01
    ]
    assert metrics["global_step"] in (below[0], below[0] + 1)
    assert metrics["global_step"] < 1000


class NoteExporter(est.Exporter):
    """Records its arguments and exports a file."""

    name = "notes"

    def __init__(self) -> None:
        self.finals = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.finals.append((int(eval_result["global_step"]), is_the_final_export))
        Path(export_path).mkdir(parents=True, exist_ok=True)
        note = Path(export_path) / "note.json"
        note.write_text(json.dumps({"checkpoint": checkpoint_path}))
        return str(note)


def test_own_exporter_sees_each_evaluation(tmp_path) -> None:
    estimator, exporter = make(tmp_path), NoteExporter()
    spec = est.EvalSpec(eval_fn, exporters=exporter, throttle_secs=0)
    _, exports = est.train_and_evaluate(estimator, est.TrainSpec(train_fn(), 10), spec)
    assert exporter.finals == [(5, False), (10, True)]
    assert exports == [str(tmp_path / "model" / "export" / "notes" / "note.json")]
    checkpoint = json.loads(Path(exports[0]).read_text())["checkpoint"]
    assert checkpoint == estimator.latest_checkpoint()


@pytest.mark.slow
def test_best_model_is_exported_and_predicts(tmp_path) -> None:
    pytest.importorskip("flatbuffers", reason="exports need stratagem[checkpoint]")
    specs = {"x": keras.KerasTensor((None, 3), "float32")}
    receiver_fn = est.export.build_raw_serving_input_receiver_fn(specs)
    exporters = [est.BestExporter("best", receiver_fn), est.FinalExporter("final", receiver_fn)]
    estimator = make(tmp_path)
    _, (best, final) = est.train_and_evaluate(
        estimator,
        est.TrainSpec(train_fn(), max_steps=12),
        est.EvalSpec(eval_fn, exporters=exporters, throttle_secs=0),
    )
    kernel, bias = in_numpy(12, 4)
    for path in (best, final):
        loaded = est.load_exported(path)
        (serve,) = loaded.signatures.values()
        np.testing.assert_allclose(
            np.asarray(serve(x=EVAL_X)["y"]), EVAL_X @ kernel + bias, atol=1e-4
        )
    assert len(list((tmp_path / "model" / "export" / "best").iterdir())) >= 1
    assert len(list((tmp_path / "model" / "export" / "final").iterdir())) == 1


@pytest.mark.slow
def test_evaluator_beside_follows_the_folder(tmp_path, monkeypatch) -> None:
    make(tmp_path).train(train_fn(), max_steps=12)
    cluster = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}
    cluster["task"] = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    metrics, _ = est.train_and_evaluate(
        make(tmp_path),
        est.TrainSpec(train_fn(), max_steps=12),
        est.EvalSpec(eval_fn, steps=None, start_delay_secs=0, throttle_secs=0),
    )
    kernel, bias = in_numpy(12, 4)
    np.testing.assert_allclose(
        metrics["loss"], np.mean((EVAL_X @ kernel + bias - EVAL_Y) ** 2), rtol=1e-4
    )


def test_hooks_see_values_of_their_steps(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    estimator = make(tmp_path, log=4, log_step_count_steps=None)
    final = est.FinalOpsHook(["loss", "global_step"])
    summaries = est.SummarySaverHook(
        3, output_dir=tmp_path / "logs", summary_op={"my_loss": "loss"}
    )
    stop = est.StopAtStepHook(num_steps=6)
    estimator.train(train_fn(), hooks=[final, summaries, stop])
    losses = []
    for step in range(6):
        kernel, bias = in_numpy(step, 4)
        rows = np.arange(4 * step, 4 * step + 4) % 16
        losses.append(np.mean((TRAIN_X[rows] @ kernel + bias - TRAIN_Y[rows]) ** 2))
    np.testing.assert_allclose(final.final_ops_values[0], losses[5], rtol=1e-4)
    assert int(final.final_ops_values[1]) == 6
    points = read_scalars(tmp_path / "logs")["my_loss"]
    assert [step for step, _ in points] == [1, 4]
    np.testing.assert_allclose([value for _, value in points], [losses[0], losses[3]], rtol=1e-4)
    traced = [m for m in (r.getMessage() for r in caplog.records) if m.startswith("traced")]
    got = [float(message.split(" = ")[1].split(" ")[0]) for message in traced]
    np.testing.assert_allclose(got, [2 * losses[0], 2 * losses[4]], rtol=1e-4)


def test_speed_of_training_is_written(tmp_path) -> None:
    make(tmp_path, log_step_count_steps=4).train(train_fn(), max_steps=10)
    points = read_scalars(tmp_path / "model")["global_step/sec"]
    assert [step for step, _ in points] == [5, 9]
    assert all(speed > 0 for _, speed in points)


@pytest.mark.slow
def test_loss_that_diverges_ends_training(tmp_path) -> None:
    estimator = make(tmp_path, rate=1e30)
    with pytest.raises(est.NanLossDuringTrainingError, match="became NaN at global step"):
        estimator.train(train_fn(), hooks=[est.NanTensorHook("loss")], max_steps=50)
    other = make(tmp_path / "other", rate=1e30)
    other.train(train_fn(), hooks=[est.NanTensorHook("loss", fail_on_nan_loss=False)], max_steps=50)
    assert other.get_variable_value("global_step") < 50

"""Workers train an Estimator to the weights of one process, and evaluators measure beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.multiprocess.cluster import PROGRAMS, completed, written
from tests.unit.estimator.model_functions import (
    dense_layers,
    examples,
    plain_model,
    weights_of_model,
)

pytestmark = pytest.mark.slow

_LIMIT_S = 180


@pytest.mark.parametrize("num_devices", [1, 2])
def test_workers_train_one_model(num_devices: int, tmp_path: Path) -> None:
    """38 examples, batches of 8 in all: the second worker gets less of the last one."""
    model_dir, folder = tmp_path / "model", tmp_path / "results"
    folder.mkdir()
    completed([str(PROGRAMS / "estimating.py"), str(num_devices), str(model_dir), str(folder)], 2)

    x, y = examples(38)
    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for start in range(0, 38, 8):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    weights, logits = weights_of_model(model), np.asarray(model(x))
    for index, found in enumerate(written(folder, 2)):
        assert found["calls"].tolist() == [index, index]
        assert found["global_step"] == 5
        np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-5)
        np.testing.assert_allclose(found["accuracy"], expected["accuracy"], atol=1e-5)
        np.testing.assert_allclose(found["logits"], logits, atol=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, atol=1e-5)
        served = sg.estimator.load_exported(str(found["exported"]))["serving_default"](x)
        np.testing.assert_allclose(served["logits"], logits, atol=1e-5)
    # One process has written, and one only.
    assert len(list(model_dir.glob("events*"))) == 1
    assert len(list((model_dir / "export").iterdir())) == 1


def _launched(program: str, *arguments: object) -> str:
    """Runs two workers and an evaluator, which is told to end as soon as the workers have."""
    main = [sys.executable, "-c", "from stratagem.cli import main; main()", "launch"]
    command = [*main, "--workers", "2", "--evaluator", "--evaluator-grace-s", "0"]
    ended = subprocess.run(
        [*command, "--grace-s", "60", str(PROGRAMS / program), *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def loss_in_numpy(num_steps: int) -> float:
    """Gradient descent on 8 rows a step: 4 of the even ones and 4 of the odd ones, in order."""
    x = np.random.default_rng(7).normal(size=(32, 3)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5])
    kernel, bias = np.zeros(3), 0.0
    for step in range(num_steps):
        rows = np.arange(8 * step, 8 * step + 8) % 32
        error = x[rows] @ kernel + bias - y[rows]
        kernel, bias = kernel - 0.05 * 2 * x[rows].T @ error / 8, bias - 0.05 * 2 * error.mean()
    return float(np.mean((x @ kernel + bias - y) ** 2))


def test_workers_end_together_and_the_evaluator_measures_their_last_checkpoint(tmp_path) -> None:
    _launched("estimator_roles.py", tmp_path)
    names = ("worker0", "worker1", "evaluator0")
    chief, worker, evaluator = (json.loads((tmp_path / f"{n}.json").read_text()) for n in names)
    assert chief == {"metrics": None, "last step": 30, "questions": 30}
    assert worker == {"metrics": None, "last step": 30, "questions": 0}
    assert evaluator["questions"] == 0
    assert evaluator["metrics"]["global_step"] == 30
    assert evaluator["metrics"]["loss"] == pytest.approx(loss_in_numpy(30), rel=1e-4)


def test_evaluator_of_keras_measures_what_the_workers_do_up_to_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    output = _launched("evaluated.py", tmp_path, num_epochs := 3)
    trained = json.loads((tmp_path / "trainer.json").read_text())
    report = json.loads((tmp_path / "evaluator.json").read_text())
    assert report["was stopped"]
    epochs = [one["epoch"] for one in report["evaluations"]]
    assert (epochs[0], epochs[-1]) == (1, num_epochs)
    for one in report["evaluations"]:
        assert one["step"] == 10 * one["epoch"]
        for name in ("loss", "accuracy"):
            expected = trained[f"val_{name}"][one["epoch"] - 1]
            assert one[name] == pytest.approx(expected, rel=1e-5), (one["epoch"], name)
        assert f"[evaluator 0] ckpt-{one['epoch']:04d}.weights.h5: loss " in output

"""Each example runs as a user runs it, in a process of its own, and prints what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.examples.programs import EXAMPLES, LAUNCHER, assert_same, promised, run

_LAUNCHER = (*LAUNCHER, "--workers", "2", "--show", "leader")


def _train(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Returns the last line of the main example and the results that it wrote."""
    launcher = _LAUNCHER if "multi_worker" in arguments else ()
    program = EXAMPLES / "01_train_digits.py"
    line = run(program, "--output", str(folder), *arguments, launcher=launcher)[-1]
    return line, json.loads((folder / "history.json").read_text())


def test_examples_each_promise_their_last_line() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(names) >= 5
    for number, name in enumerate(names, start=1):
        assert name.startswith(f"{number:02d}_")
        assert promised(EXAMPLES / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "02_custom_loop.py",
        "03_jax_only.py",
        "04_merge_call.py",
        "05_gan.py",
        "06_new_strategy.py",
        "07_logical_devices.py",
        "08_estimator_digits.py",
        "09_keras_estimator.py",
    ],
)
def test_example_ends_with_the_promised_line(name: str) -> None:
    assert_same(run(EXAMPLES / name)[-1], promised(EXAMPLES / name))


# Runs a program with another strategy in the place of the one that it makes.
_REPLACING = """
import runpy, sys
import stratagem as sg
made = {
    "one": lambda *_: sg.OneDeviceStrategy("cpu:0"),
    "servers": lambda *_: sg.ParameterServerStrategy(num_workers=1, num_servers=1),
}
sg.MirroredStrategy = made[sys.argv[1]]
del sys.argv[:2]
if __name__ == "__main__":
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("01_train_digits.py", ("--epochs", "1", "--dropout", "0"), id="digits"),
        pytest.param("guides/01_keras.py", (), id="keras"),
    ],
)
def test_example_that_calls_fit_is_the_same_on_a_worker_and_a_server(
    tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    program = tmp_path / "replacing.py"
    program.write_text(_REPLACING)
    last = {
        place: run(program, place, str(EXAMPLES / name), *arguments, cwd=tmp_path)[-1]
        for place in ("one", "servers")
    }
    assert "ccuracy" in last["one"]
    assert last["servers"] == last["one"]


@pytest.mark.parametrize("name", ["08_estimator_digits.py", "09_keras_estimator.py"])
def test_estimators_promise_the_same_twice(name: str) -> None:
    """Of one device and of two replicas; of the Estimator and of `fit`."""
    one, two = re.findall(r": (\d\.\d+)", promised(EXAMPLES / name))
    assert one == two


@pytest.mark.slow
def test_train_digits_short_run_writes_model_history_and_picture(tmp_path: Path) -> None:
    line, results = _train(tmp_path / "new", "--epochs", "2")

    accuracy = float(line.removeprefix("Test accuracy: "))
    assert accuracy >= 0.9  # of the 0.97 that all epochs reach
    assert results["num_replicas"] == 2
    assert results["test_accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert {len(curve) for curve in results["history"].values()} == {2}
    assert len(results["images_per_s"]) == 2
    assert (tmp_path / "new" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    model = keras.saving.load_model(tmp_path / "new" / "model.keras")
    assert model.predict(np.zeros((3, 8, 8, 1)), verbose=0).shape == (3, 10)


@pytest.mark.slow
def test_train_digits_on_two_workers_is_one_training(tmp_path: Path) -> None:
    line, results = _train(tmp_path, "--epochs", "2", "--strategy", "multi_worker")

    assert "Test accuracy: " in line
    assert results["strategy"] == "MultiWorkerMirroredStrategy on 2 devices of 2 processes (cpu)"
    assert results["num_replicas"] == 2
    assert results["test_accuracy"] >= 0.9
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert model.predict(np.zeros((3, 8, 8, 1)), verbose=0).shape == (3, 10)


@pytest.mark.slow
def test_train_digits_steps_per_execution_draws_the_same_curve(tmp_path: Path) -> None:
    arguments = ("--epochs", "1", "--strategy", "one_device")
    _, single = _train(tmp_path / "single", *arguments)
    _, several = _train(tmp_path / "several", *arguments, "--steps-per-execution", "3")
    _assert_same_curves(several, single)


def _assert_same_curves(results: dict[str, Any], reference: dict[str, Any]) -> None:
    assert results["history"].keys() == reference["history"].keys()
    for quantity in ("loss", "val_loss"):
        np.testing.assert_allclose(
            results["history"][quantity], reference["history"][quantity], rtol=1e-4
        )


@pytest.mark.slow
def test_train_digits_whole_run_reaches_the_promised_accuracy(tmp_path: Path) -> None:
    line, _ = _train(tmp_path)
    assert_same(line, promised(EXAMPLES / "01_train_digits.py"))
    assert float(line.removeprefix("Test accuracy: ")) >= 0.97


@pytest.mark.slow
def test_train_digits_without_dropout_draws_the_same_curve_under_every_strategy(
    tmp_path: Path,
) -> None:
    whole = ("--dropout", "0", "--strategy")
    _, plain = _train(tmp_path / "plain", *whole, "default")
    assert plain["num_replicas"] == 1
    for name, arguments in {
        "two_workers": ("multi_worker",),
        "mirrored": ("mirrored",),
        "one_device": ("one_device",),
        "one_mirrored_device": ("mirrored", "--devices", "cpu:0"),
        "three_devices": ("mirrored", "--devices", "cpu:0,cpu:1,cpu:2"),  # 128 = 43 + 43 + 42
    }.items():
        _, results = _train(tmp_path / name, *whole, *arguments)
        _assert_same_curves(results, plain)

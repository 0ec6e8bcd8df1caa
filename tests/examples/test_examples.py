"""Each example runs as a user runs it, in a process of its own, and prints what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
_PROMISE = "# Expected last line: "
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# What the test session sets for itself, and an example has to get from the library.
_SET_BY_LIBRARY = ("KERAS_BACKEND", "NPROC")
# Far beyond what an example takes: it ends one that hangs.
_LIMIT_S = 900
_LAUNCHER = (
    *("-c", "from stratagem.cli import main; main()"),
    *("launch", "--workers", "2", "--show", "leader"),
)


def _run(name: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    """Returns the last line that an example prints."""
    environment = {key: text for key, text in os.environ.items() if key not in _SET_BY_LIBRARY}
    finished = subprocess.run(
        [sys.executable, *launcher, str(_EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.splitlines()[-1]


def _promised(name: str) -> str:
    first = (_EXAMPLES / name).read_text().splitlines()[0]
    assert first.startswith(_PROMISE), f"{name} starts with {first!r}, not with {_PROMISE!r}"
    return first.removeprefix(_PROMISE)


def _assert_same(line: str, promised: str) -> None:
    """Words must be equal; numbers may differ by what rounding makes of a whole training."""
    assert _NUMBER.sub("0", line) == _NUMBER.sub("0", promised)
    got = [float(number) for number in _NUMBER.findall(line)]
    np.testing.assert_allclose(got, [float(n) for n in _NUMBER.findall(promised)], rtol=0.01)


def _train(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Returns the last line of the main example and the results that it wrote."""
    launcher = _LAUNCHER if "multi_worker" in arguments else ()
    line = _run("01_train_digits.py", "--output", str(folder), *arguments, launcher=launcher)
    return line, json.loads((folder / "history.json").read_text())


def test_examples_each_promise_their_last_line() -> None:
    names = sorted(path.name for path in _EXAMPLES.glob("*.py"))
    assert len(names) >= 5
    for number, name in enumerate(names, start=1):
        assert name.startswith(f"{number:02d}_")
        assert _promised(name)


@pytest.mark.parametrize(
    "name",
    [
        "02_custom_loop.py",
        "03_jax_only.py",
        "04_merge_call.py",
        pytest.param("05_gan.py", marks=pytest.mark.slow),
        "06_new_strategy.py",
        pytest.param("07_logical_devices.py", marks=pytest.mark.slow),
        pytest.param("08_estimator_digits.py", marks=pytest.mark.slow),
        pytest.param("09_keras_estimator.py", marks=pytest.mark.slow),
    ],
)
def test_example_ends_with_the_promised_line(name: str) -> None:
    _assert_same(_run(name), _promised(name))


@pytest.mark.parametrize("name", ["08_estimator_digits.py", "09_keras_estimator.py"])
def test_estimators_promise_the_same_twice(name: str) -> None:
    """Of one device and of two replicas; of the Estimator and of `fit`."""
    one, two = re.findall(r": (\d\.\d+)", _promised(name))
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
    _assert_same(line, _promised("01_train_digits.py"))
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

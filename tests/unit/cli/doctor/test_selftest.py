"""Cases pass on this machine; wrong weights, crashes and hangs are told apart."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import keras
import numpy as np
import pytest

from stratagem.cli.doctor import selftest as cases
from stratagem.cli.doctor import selftest as reference
from stratagem.cli.doctor.findings import Level
from stratagem.cli.doctor.selftest import MARKER, strategies, trained_weights

_BY_NAME = {case.name: case for case in cases.CASES}


def test_every_strategy_is_a_case() -> None:
    assert list(_BY_NAME) == list(strategies())


@pytest.mark.parametrize(
    "name",
    [
        "mirrored",
        *(pytest.param(name, marks=pytest.mark.slow) for name in _BY_NAME if name != "mirrored"),
    ],
)
def test_case_passes_here(name: str) -> None:
    (found,) = cases.check_cases([_BY_NAME[name]])
    assert (found.topic, found.level) == ("self-test", Level.OK), found
    assert "the weights of NumPy, by" in found.text


def _answer(
    monkeypatch: pytest.MonkeyPatch, stdout: str, *, code: int = 0, stderr: str = ""
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        del options
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)


def _line(weights: list[float]) -> str:
    return f"{MARKER} {json.dumps({'weights': weights, 'replicas': 2})}\n"


def test_wrong_weights_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = trained_weights()
    weights[1] += 1e-3
    _answer(monkeypatch, _line(weights.tolist()))
    found = cases.check_case(_BY_NAME["mirrored"])
    assert found.level is Level.ERROR
    assert found.text == "MirroredStrategy: weights differ by 1.0e-03."
    assert "python -m stratagem.cli.doctor.selftest mirrored for the whole" in found.fix


def test_every_worker_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, "[worker 0] " + _line(trained_weights().tolist()))
    assert cases.check_case(_BY_NAME["multi_worker"]).level is Level.ERROR
    _answer(monkeypatch, 2 * ("[worker 0] " + _line(trained_weights().tolist())))
    found = cases.check_case(_BY_NAME["multi_worker"])
    assert found.level is Level.OK
    assert found.text.endswith("the weights of NumPy, by 2 replicas.")


@pytest.mark.parametrize(
    ("stdout", "stderr", "problem"),
    [
        ("", "Traceback\nValueError: no device\nFix: buy one\n", "ValueError: no device"),
        ("hello\n", "", "hello"),
        ("", "", "exit code 3 without output"),
    ],
    ids=["error", "output", "nothing"],
)
def test_crash_fails_with_its_error(stdout, stderr, problem, monkeypatch) -> None:
    _answer(monkeypatch, stdout, code=3, stderr=stderr)
    assert cases.check_case(_BY_NAME["mirrored"]).text == f"MirroredStrategy: {problem}."


def test_hang_fails_after_the_limit() -> None:
    found = cases.check_case(_BY_NAME["mirrored"], limit_s=0.05)
    assert found.text == "MirroredStrategy: not finished after 0 s."


def test_case_without_its_library_is_skipped() -> None:
    case = dataclasses.replace(_BY_NAME["mirrored"], needs="no_such_library")
    found = cases.check_case(case)
    assert found.level is Level.NOTE
    assert "skipped, because no_such_library is not installed" in found.text


# The reference, against the closed form of the first step and the solution that it approaches.


def test_keras_alone_reaches_the_same_weights() -> None:
    features, labels = reference.data()
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(reference.LEARNING_RATE), "mse")
    model.fit(
        features,
        labels,
        batch_size=reference.BATCH_SIZE,
        epochs=reference.EPOCHS,
        shuffle=False,
        verbose=0,
    )
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(
        np.concatenate([kernel[:, 0], bias]), reference.trained_weights(), atol=1e-6
    )

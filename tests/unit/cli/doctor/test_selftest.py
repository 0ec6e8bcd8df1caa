"""Cases pass on this machine; wrong weights, crashes and hangs are told apart."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess

import keras
import numpy as np
import pytest
from rich.console import Console

from stratagem.cli.doctor import selftest as cases
from stratagem.cli.doctor import selftest as reference
from stratagem.cli.doctor.selftest import (
    CASES,
    MARKER,
    Case,
    CaseOutcome,
    strategies,
    trained_weights,
)

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
    outcome = cases.run_case(_BY_NAME[name])
    assert outcome.problem == ""
    assert outcome.largest_difference is not None
    assert outcome.largest_difference < 1e-6


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
    outcome = cases.run_case(_BY_NAME["mirrored"])
    assert not outcome.passed
    assert outcome.problem == "weights differ by 1.0e-03"


def test_every_worker_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, "[worker 0] " + _line(trained_weights().tolist()))
    assert not cases.run_case(_BY_NAME["multi_worker"]).passed
    _answer(monkeypatch, 2 * ("[worker 0] " + _line(trained_weights().tolist())))
    assert cases.run_case(_BY_NAME["multi_worker"]).passed


@pytest.mark.parametrize(
    ("stdout", "stderr", "problem"),
    [
        ("", "Traceback\nValueError: no device\nFix: buy one\n", "ValueError: no device"),
        ("hello\n", "", "hello"),
        ("", "", "exit code 3 without output"),
    ],
    ids=["error", "output", "nothing"],
)
def test_crash_fails_with_its_error(
    stdout: str, stderr: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answer(monkeypatch, stdout, code=3, stderr=stderr)
    assert cases.run_case(_BY_NAME["mirrored"]).problem == problem


def test_hang_fails_after_the_limit() -> None:
    outcome = cases.run_case(_BY_NAME["mirrored"], limit_s=0.05)
    assert outcome.problem == "not finished after 0 s"


def test_case_without_its_library_is_skipped() -> None:
    case = dataclasses.replace(_BY_NAME["mirrored"], needs="no_such_library")
    outcome = cases.run_case(case)
    assert outcome.is_skipped
    assert outcome.problem == "no_such_library is not installed"


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


# The table of outcomes, and the whole error below it.


def test_table_shows_each_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter(
        [
            CaseOutcome(CASES[0], 1e-8, 1, 2.0),
            CaseOutcome(CASES[1], problem="ValueError: " + 30 * "long "),
            CaseOutcome(CASES[2], problem="zmq is not installed", is_skipped=True),
        ]
    )

    def run_case(case: Case) -> CaseOutcome:
        del case
        return next(outcomes)

    monkeypatch.setattr(cases, "run_case", run_case)
    console = Console(file=io.StringIO(), width=300)
    assert len(cases.run_shown(CASES[:3], console)) == 3
    text = console.file.getvalue()
    assert "1.0e-08" in text
    assert "skipped: zmq is not installed" in text
    assert "OneDeviceStrategy: ValueError: long long" in text

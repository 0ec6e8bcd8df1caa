"""Cases pass on this machine; wrong weights, crashes and hangs are told apart."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest

from stratagem.cli.selftest import cases
from stratagem.cli.selftest.cases import trained_weights
from stratagem.cli.selftest.program import MARKER, STRATEGIES

_BY_NAME = {case.name: case for case in cases.CASES}


def test_every_strategy_is_a_case() -> None:
    assert list(_BY_NAME) == list(STRATEGIES)


@pytest.mark.parametrize(
    "name",
    [
        "mirrored",
        *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "mirrored"),
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
    return f"{MARKER} {json.dumps(weights)} 2 replicas\n"


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

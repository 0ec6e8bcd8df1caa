"""`stratagem doctor` and `stratagem env`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("stratagem")), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_machine_that_can_train_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    finished = _run("doctor")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "JAX sees" in finished.stdout
    assert "0 errors" in finished.stdout


def test_error_is_shown_with_its_fix_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    finished = _run("doctor", "--json")
    assert finished.returncode == 1
    (error,) = [one for one in json.loads(finished.stdout) if one["level"] == "error"]
    assert error["topic"] == "settings"
    assert "KERAS_BACKEND=torch" in error["text"]
    assert "KERAS_BACKEND=jax" in error["fix"]


@pytest.mark.slow
def test_warning_counts_if_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DEBUG_NANS", "true")
    assert _run("doctor", "--json").returncode == 0
    assert _run("doctor", "--json", "--strict").returncode == 1


def test_missing_script_is_a_usage_error() -> None:
    finished = _run("doctor", "missing.py")
    assert finished.returncode == 2
    assert "missing.py" in finished.stderr


@pytest.mark.slow
def test_env_is_a_table() -> None:
    finished = _run("env")
    assert finished.returncode == 0
    assert finished.stdout.startswith("| | |\n|---|---|\n| system |")
    assert "| keras | " in finished.stdout

"""`stratagem test`, as an administrator runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stratagem", "test", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_chosen_case_is_run() -> None:
    finished = _run("--only", "default", "--json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (row,) = json.loads(finished.stdout)
    assert row["passed"]
    assert row["case"]["name"] == "default"


@pytest.mark.slow
def test_case_that_fails_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    finished = _run("--only", "default")
    assert finished.returncode == 1
    assert "failed" in finished.stdout


def test_unknown_case_is_a_usage_error() -> None:
    finished = _run("--only", "abacus")
    assert finished.returncode == 2
    assert "No such case: abacus. There are default, one_device, mirrored" in finished.stderr

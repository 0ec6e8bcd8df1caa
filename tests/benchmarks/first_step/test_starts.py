"""Programs that time an import, and workers that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Environments
from benchmarks.first_step import starts
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError
from benchmarks.workers.protocol import ANSWER_PREFIX


def seconds_of(before: str, folder: Path) -> float:
    command = [sys.executable, "-c", starts.import_program(before, "slow_module")]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return json.loads(told.removeprefix(ANSWER_PREFIX))["seconds"]


def test_import_is_timed_by_itself(tmp_path: Path) -> None:
    a_day_passes = (
        "import time\nreal = time.perf_counter\ntime.perf_counter = lambda: real() + 86400"
    )
    (tmp_path / "slow_module.py").write_text(a_day_passes, encoding="utf-8")
    assert seconds_of("", tmp_path) >= 86400
    assert seconds_of("import slow_module", tmp_path) < 86400


def test_first_round_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        ("", "import stratagem"): iter([9.0, 0.1, 0.2]),
        ("import stratagem", "import keras"): iter([9.0, 1.0, 1.0]),
        ("", "import keras"): iter([9.0, 2.0, 4.0]),
    }

    class Process:
        def __init__(self, name: str, command: list[str], variables: dict[str, str]) -> None:
            lines = command[2].split("\n")
            self._seconds = next(told[lines[1], lines[3]])

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def read_answer(self, limit_s: float) -> dict[str, float]:
            return {"seconds": self._seconds}

    monkeypatch.setattr(starts, "WorkerProcess", Process)
    ours, keras = starts.time_imports(2, Environments(), Effort())
    assert (list(ours.seconds), ours.wanted_s) == ([0.1, 0.2], 0.1)
    assert (list(keras.seconds), list(keras.reference_s)) == ([1.0, 1.0], [2.0, 4.0])
    assert keras.ratio == pytest.approx(0.375)


def test_worker_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_MODULE", "no_such_module")
    with pytest.raises(WorkerError, match=r"(?s)Exit code .*: 1\..*no module 'no_such_module'"):
        starts.time_workers(1, Environments(), Effort())

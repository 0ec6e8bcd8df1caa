"""The benchmark as a whole, with made-up trainings in place of workers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.runner import Effort
from benchmarks.slow_links import run, run_slow_links
from benchmarks.slow_links.curves import Training
from benchmarks.slow_links.methods import METHODS, TRIALS, Trial
from benchmarks.slow_links.training import Trainer
from benchmarks.worker_process import WorkerError
from tests.benchmarks.slow_links.trainings import training


@contextlib.contextmanager
def _no_hosts() -> Generator[None]:
    yield None


def _measured(self: Trainer) -> Training:
    if self.method.name == "top-k":
        raise WorkerError("out of memory")
    if self.trial.first_steps:
        assert self.weights is not None
        assert self.weights.read_text() == f"{self.name}, {self.trial.first_steps}"
    else:
        assert self.weights is None
    return training(self.method.name, (4.0, 2.0), task=self.name)


def _weights(environments: Any, hosts: Any, name: str, trial: Trial, weights: Path) -> None:
    assert not weights.exists()
    assert weights.is_absolute()
    weights.write_text(f"{name}, {trial.first_steps}")


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "two_hosts", _no_hosts)
    monkeypatch.setattr(run, "train_alone", _weights)
    monkeypatch.setattr(Trainer, "measure", _measured)


def _run(folder: Path, **options: Any) -> tuple[bool, dict[str, Any], str]:
    text = io.StringIO()
    console = Console(file=text, width=200)
    went_well = run_slow_links(Environments(), Effort(), console, folder, **options)
    return went_well, json.loads((folder / "slow_links.json").read_text()), text.getvalue()


@pytest.mark.slow
def test_all_trials_and_methods_and_what_failed(tmp_path: Path) -> None:
    went_well, results, printed = _run(tmp_path)
    assert not went_well
    cases = [f"{name}, {one.name}" for name, trial in TRIALS.items() for one in trial.methods]
    failed = [one["case"] for one in results["failures"]]
    assert failed == [case for case in cases if "top-k" in case]
    assert len(results["trainings"]) == len(cases) - len(failed)
    assert "long transformer, DiLoCo, H=50: sends 1/1.0 of the bytes" in printed
    for name in TRIALS:
        assert (tmp_path / f"slow_links_{name.replace(' ', '_')}.png").is_file()


@pytest.mark.slow
def test_a_later_run_of_one_case_keeps_the_others(tmp_path: Path) -> None:
    _run(tmp_path, only="recommender", is_quick=True)
    went_well, results, printed = _run(tmp_path, only="long transformer, lockstep")
    assert went_well
    assert [(one["task"], one["method"]) for one in results["trainings"]] == [
        ("recommender", "lockstep"),
        ("recommender", "DiLoCo, H=50"),
        ("long transformer", "lockstep"),
    ]
    assert "recommender: to a validation loss" not in printed


def test_trials_begin_with_lockstep_and_end_with_whole_periods() -> None:
    for trial in TRIALS.values():
        assert trial.methods[0] is METHODS[0]
        assert trial.num_steps % trial.point_steps == 0
        assert all(trial.num_steps % one.period == 0 or one.period == 8 for one in trial.methods)

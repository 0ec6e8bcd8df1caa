"""The command: files, table, what is skipped, and the exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from benchmarks import __main__ as command
from benchmarks.cases import Case
from benchmarks.machine import load_warning
from tests.benchmarks.sides import fake_case, fake_side
from tests.command_runner import CliRunner

PEER = dataclasses.replace(fake_side("peer"), environment="peers")
Run = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command on given cases and returns its result and what it wrote."""

    def run_cases(cases: Sequence[Case]) -> tuple[Result, dict[str, Any]]:
        monkeypatch.setattr(command, "BENCHMARKS", {"sample": lambda *arguments: list(cases)})
        monkeypatch.setattr(command, "find_accelerator", lambda *arguments: None)
        arguments = ["sample", "--quick", "--output", str(tmp_path), "--peers", "nowhere"]
        result = CliRunner().invoke(command.main, arguments)
        return result, json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))

    return run_cases


def test_results_are_written(run: Run, tmp_path: Path) -> None:
    case = fake_case(fake_side("ours", FAKE_EPOCH_S="0.5"), fake_side("reference"))
    result, written = run([case])
    assert result.exit_code == 0, result.output
    assert written["benchmark"] == "sample"
    assert written["versions"] == {"ours": {"python": "3"}}
    assert {"cpu", "cores", "python", "platform", "accelerator", "load"} == set(written["machine"])
    assert written["rounds"] == 2
    assert written["rows"] == [
        {
            "case": "case",
            "metric": "steps/s",
            "ours": 2.0,
            "reference": 1.0,
            "reference_name": "reference",
            "ratio": 2.0,
            "ratio_min": 2.0,
            "ratio_max": 2.0,
            "ours_rounds": [2.0, 2.0],
            "reference_rounds": [1.0, 1.0],
        }
    ]
    assert (tmp_path / "sample.png").read_bytes().startswith(b"\x89PNG")
    assert "2.000" in result.output


def test_all_together_only_main_cases_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = fake_case(fake_side("ours"), fake_side("reference"))
    other = dataclasses.replace(main, name="other", is_main=False)
    monkeypatch.setattr(command, "BENCHMARKS", {"sample": lambda *arguments: [main, other]})
    monkeypatch.setattr(command, "_WHOLE", {})
    monkeypatch.setattr(command, "find_accelerator", lambda *arguments: None)
    for names, expected in (([], {"case"}), (["sample"], {"case", "other"})):
        result = CliRunner().invoke(command.main, [*names, "--output", str(tmp_path)])
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))
        assert {row["case"] for row in written["rows"]} == expected


def test_missing_peers_are_skipped_aloud(run: Run) -> None:
    case = fake_case(fake_side("ours"), fake_side("reference"), PEER)
    result, written = run([case])
    assert result.exit_code == 0, result.output
    assert [row["reference_name"] for row in written["rows"]] == ["reference"]
    assert written["skipped"][0]["reference_name"] == "peer"
    assert "Skipped: case, peer" in result.output
    assert ".venv-peers" in result.output


def test_failure_is_reported_and_the_others_go_on(run: Run, tmp_path: Path) -> None:
    bad = fake_case(fake_side("ours", "dies later"), fake_side("reference"))
    good = fake_case(fake_side("ours"), fake_side("reference"))
    result, written = run([bad, good])
    assert result.exit_code == 1
    assert len(written["rows"]) == len(written["failures"]) == 1
    assert "out of memory" in result.output


def test_nothing_measured_draws_nothing(run: Run, tmp_path: Path) -> None:
    result, written = run([fake_case(fake_side("ours"), PEER)])
    assert result.exit_code == 0, result.output
    assert written["rows"] == []
    assert not (tmp_path / "sample.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nonsense"], "No benchmark nonsense"), (["--devices", "1,x"], "'x' is no place to run")],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command.main, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_loaded_machine_is_reported() -> None:
    assert load_warning(0.1) is None
    assert "not to be trusted" in (load_warning(3.0) or "")

"""The command of language models: its parts, their time, and what a rerun leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import language_models
from benchmarks.gpu.language_models import CHECKS, main
from benchmarks.gpu.sides import select
from benchmarks.gpu_profile.parts import Part
from tests.gpu import register
from tests.gpu.checks import CHECKS as REGISTERED

assert register


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts that the command would run."""
    started: list[Part] = []
    monkeypatch.setattr(
        language_models, "run_parts", lambda parts, output, at_once=1: started.extend(parts)
    )
    for name in ("STRATAGEM_GPU_RESULTS", "STRATAGEM_GPU_CHECKS_ON"):
        monkeypatch.setenv(name, "")
    return started


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_checks_exist() -> None:
    assert set(CHECKS) <= set(REGISTERED)


def test_sides_have_accumulation_lora_8192_tokens_and_pinned_state() -> None:
    keys = {side.key for side in select(["llama"])}
    assert {
        "llama1b-fit-4-an-update",
        "llama1b-torch-compile-4-an-update",
        "llama1b-fit-8192-tokens",
        "llama1b-fit-pinned-optimizer-state",
        "llama3b-fit-chunked-loss",
        "llama8b-lora-fit-chunked-loss",
    } <= keys


def test_parts_share_the_budget_and_the_report_follows_the_sides(
    parts: list[Part], tmp_path: Path
) -> None:
    _write(tmp_path / "sides" / "results.json", {"sides": []})
    main(["--output", str(tmp_path), "--budget-s", "570"])
    assert [part.name for part in parts] == [
        "sides",
        "report",
        "checks",
        "cards-8xH200",
        "cards-64xH200",
    ]
    sides, _, checks, cards, _ = parts
    assert 400 < sides.limit_s < checks.limit_s - 100
    assert cards.limit_s < 570
    assert "--resume" in sides.arguments
    assert "--resume" in checks.arguments


def test_a_rerun_keeps_no_time_for_checks_that_passed(parts: list[Part], tmp_path: Path) -> None:
    for name in CHECKS[:-1]:
        _write(tmp_path / "checks" / f"{name}.json", {"passed": True})
    main(["--output", str(tmp_path)])
    assert "checks" in [part.name for part in parts]
    first = parts[0].limit_s
    _write(tmp_path / "checks" / f"{CHECKS[-1]}.json", {"passed": True})
    parts.clear()
    main(["--output", str(tmp_path), "--parts", "sides,checks"])
    assert [part.name for part in parts] == ["sides"]
    assert parts[0].limit_s > first + 100


def test_without_time_no_part_starts(
    parts: list[Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--output", str(tmp_path), "--budget-s", "10"])
    assert not parts
    assert "sides: no time is left" in capsys.readouterr().out


def test_an_unknown_part_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: list[Part]
) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--parts", "sides,maps"])
    assert "--parts: maps; there are sides, checks, cards" in capsys.readouterr().err
    assert not parts


@pytest.mark.slow
def test_a_call_measures_reports_and_measures_nothing_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STRATAGEM_GPU_RESULTS", "STRATAGEM_GPU_CHECKS_ON"):
        monkeypatch.setenv(name, "")
    options = ["--output", str(tmp_path), "--tiny", "--only", "mlp-jax-loop-by-hand"]
    options += ["--parts", "sides,checks", "--checks", "kernel_that_does_not_end"]
    main(options)
    printed = capsys.readouterr().out
    assert "JAX loop by hand" in printed
    assert "passed kernel_that_does_not_end" in printed
    first = (tmp_path / "sides" / "results.json").read_text()
    main(options)
    second = json.loads((tmp_path / "sides" / "results.json").read_text())
    assert second["sides"] == json.loads(first)["sides"]
    assert "kernel_that_does_not_end" in (tmp_path / "checks.log").read_text()

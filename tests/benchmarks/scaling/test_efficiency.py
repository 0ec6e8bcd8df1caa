"""Two workers beside one: which sides, which rows, and how the command shows them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.cases import Case, Environments, Place
from benchmarks.runner import Measurement
from benchmarks.scaling import efficiency
from benchmarks.scaling.hardware import GpuCluster
from benchmarks.scaling.outlook import NUMBERS_OF_GPUS, prediction_rows
from benchmarks.scaling.pictures import draw_predictions
from benchmarks.scaling.programs import Reduction, StepProgram
from tests.benchmarks.sides import fake_side
from tests.command_runner import CliRunner

ENVIRONMENTS = Environments(peers=Path("nowhere"))
TWO_CPUS = [Place("cpu", 1), Place("cpu", 2)]
EPOCH_S = {
    "fit, 2 workers": "1.25",
    "fit, 1 worker": "1",
    "fit, apart, 2 workers": "1.0",
    "PyTorch DDP, 2 workers": "2",
    "PyTorch DDP, 1 worker": "1",
}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)


def _fake_case() -> Case:
    ours, *references = (fake_side(name, FAKE_EPOCH_S=text) for name, text in EPOCH_S.items())
    return Case(name="MLP", ours=ours, references=tuple(references))


@pytest.mark.usefixtures("two_cores")
def test_each_worker_has_as_many_examples_as_one_alone() -> None:
    cases = efficiency.make_cases(TWO_CPUS, ENVIRONMENTS)
    assert {case.ours.options.workload for case in cases} == set(efficiency.WANTED)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        sides = {side.name: side for side in (case.ours, *case.references)}
        assert sides.keys() == EPOCH_S.keys()
        for side in sides.values():
            options = side.options
            assert options.pinned, side.name
            assert options.batch_size is not None
            num_together = 1 if options.apart else options.num_devices
            per_worker = options.batch_size // num_together
            assert f"{per_worker} a worker" in case.name, side.name


def test_no_case_without_a_core_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    assert efficiency.make_cases(TWO_CPUS, ENVIRONMENTS) == []


@pytest.mark.usefixtures("two_cores")
def test_no_case_where_two_cpus_were_not_asked_for() -> None:
    assert efficiency.make_cases([Place("cpu", 1), Place("gpu", 1)], ENVIRONMENTS) == []


def test_rows_are_made_of_what_was_measured() -> None:
    case = _fake_case()
    sides = [case.ours, *case.references]
    measurements = [
        Measurement(side, (1 / float(EPOCH_S[side.name]),), {}, "fake") for side in sides
    ]
    rows = efficiency.make_rows(case, measurements)
    assert [(row["compared"], row["metric"], row["ratio"]) for row in rows] == [
        ("fit: 2 workers / 1", "efficiency", 0.8),
        ("fit, apart: 2 workers / 1", "efficiency", 1.0),
        ("PyTorch DDP: 2 workers / 1", "efficiency", 0.5),
        ("fit / fit, apart, efficiency", "efficiencies", 0.8),
        ("fit / PyTorch DDP, efficiency", "efficiencies", 1.6),
        ("fit / PyTorch DDP, 2 workers", "steps/s", 1.6),
    ]
    assert rows[0]["wanted"] == 0.85
    without_peers = efficiency.make_rows(case, measurements[:3])
    assert [row["side"] for row in without_peers] == ["fit", "fit, apart", "fit"]


@pytest.mark.slow
def test_command_writes_efficiencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "BENCHMARKS", {"scaling": lambda *arguments: [_fake_case()]})
    monkeypatch.setattr(command, "find_accelerator", lambda *arguments: None)
    arguments = ["scaling", "--quick", "--only", "MLP", "--output", str(tmp_path)]
    monkeypatch.setattr(
        "benchmarks.scaling.outlook.read_program", lambda *arguments: _step("MLP", num_bytes=10**6)
    )
    result = CliRunner().invoke(command.main, [*arguments, "--peers", "nowhere"])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
    assert [row["ratio"] for row in written["rows"]] == [0.8, 1.0, 0.5, 0.8, 1.6, 1.6]
    assert [row["num_gpus"] for row in written["predicted"]["rows"]] == list(NUMBERS_OF_GPUS)
    assert len(written["predicted"]["constants"]) == len(dataclasses.fields(GpuCluster))
    assert "nothing of it measured" in result.output
    for sentence in written["predicted"]["assumptions"]:
        assert sentence.split(":")[0] in " ".join(result.output.split())
    for picture in ("scaling.png", "scaling_predicted.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG"), picture


def test_predictions_of_several_workloads_are_drawn(tmp_path: Path) -> None:
    cluster = GpuCluster()
    steps = [_step("one", num_bytes=10**6), _step("other", num_bytes=10**9)]
    rows = [row for step in steps for row in prediction_rows(step, cluster)]
    assert [row["num_messages"] for row in rows] == [1] * 6
    assert [row["workload"] for row in rows] == ["one"] * 3 + ["other"] * 3
    assert (
        rows[0]["lowest_efficiency"] > rows[2]["lowest_efficiency"] > rows[5]["lowest_efficiency"]
    )
    draw_predictions(tmp_path / "picture.png", rows)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def _step(title: str, *, num_bytes: int) -> StepProgram:
    return StepProgram(
        title=title,
        batch_size=1,
        num_parameters=num_bytes // 4,
        dtype="float32",
        flops=1e9,
        accessed_bytes=1e6,
        reductions=(Reduction(num_bytes, "f32"),),
    )

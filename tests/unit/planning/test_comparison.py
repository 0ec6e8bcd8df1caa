"""Predicted and measured steps, part by part."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from stratagem.observe.profiling.summary import ProfileSummary
from stratagem.planning.report import show_comparison
from stratagem.planning.result import ComparedPart, compare
from stratagem.planning.step_time import StepTime
from tests.unit.observe.profiling.fabricated import two_steps, write

# Ten steps of 40 ms.
_MEASURED = ProfileSummary(
    platform="gpu",
    num_devices=8,
    num_steps=10,
    whole_s=0.4,
    parts_s={
        "compute": 0.25,
        "collectives": 0.05,
        "copies": 0.0,
        "launch": 0.02,
        "input": 0.06,
        "compilation": 0.0,
        "host": 0.02,
    },
    collectives_s=0.1,
    operations=(),
)
_PREDICTED = StepTime(
    num_devices=8,
    compute_s=0.02,
    reduction_s=0.012,
    hidden_s=0.008,
    most_hidden_s=0.01,
    launch_s=0.001,
)


def test_parts_are_side_by_side() -> None:
    comparison = compare(_PREDICTED, "gpu", _MEASURED)
    found = {part.name: (part.predicted_s, part.measured_s) for part in comparison.parts}
    assert found == {
        "compute": (0.02, pytest.approx(0.025)),
        "collectives": (pytest.approx(0.004), pytest.approx(0.005)),
        "launch": (0.001, pytest.approx(0.002)),
        "input": (None, pytest.approx(0.006)),
        "host": (None, pytest.approx(0.002)),
        "step": (pytest.approx(0.025), pytest.approx(0.04)),
    }
    ratios = {part.name: part.ratio for part in comparison.parts}
    assert ratios["compute"] == pytest.approx(0.8)
    assert ratios["input"] is None
    assert comparison.step.ratio == pytest.approx(0.625)
    assert comparison.notes == ()
    # Nothing is lost: the parts are the step, on both sides.
    parts = comparison.parts[:-1]
    assert sum(part.measured_s for part in parts) == pytest.approx(0.04)
    assert sum(part.predicted_s or 0 for part in parts) == pytest.approx(0.025)


def test_what_differs_is_noted() -> None:
    of_one = dataclasses.replace(_PREDICTED, num_devices=1)
    measured = dataclasses.replace(_MEASURED, platform="cpu")
    assert compare(of_one, "gpu", measured).notes == (
        "Measured on CPU, planned for GPU.",
        "Measured on 8 devices of a process, planned for 1.",
    )


def test_nothing_measured_has_no_ratio() -> None:
    assert ComparedPart(name="launch", predicted_s=0.1, measured_s=0.0).ratio is None


def test_table_and_json() -> None:
    comparison = compare(_PREDICTED, "tpu", _MEASURED)
    text = io.StringIO()
    show_comparison(comparison, Console(width=100, file=text))
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.getvalue().splitlines()
        if line.startswith("│")
    ]
    assert rows[0] == ["compute", "20.0 ms", "25.0 ms", "0.80"]
    assert rows[3] == ["input", "-", "6.0 ms", "-"]
    assert rows[-1] == ["step", "25.0 ms", "40.0 ms", "0.62"]
    assert "Measured on GPU, planned for TPU." in text.getvalue()
    fields = json.loads(json.dumps(comparison.to_dict()))
    assert fields["parts"][0]["ratio"] == pytest.approx(0.8)


def test_trace_is_read_from_its_path(tmp_path) -> None:
    write(tmp_path / "a" / "vm.xplane.pb", two_steps())
    comparison = compare(_PREDICTED, "cpu", tmp_path)
    assert comparison.step.measured_s == pytest.approx(1e-6)


def test_profile_without_steps_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"has no marks of steps(.|\n)*Expected a profile taken by"
    ):
        compare(_PREDICTED, "gpu", dataclasses.replace(_MEASURED, num_steps=0))

"""Figures of a run, and its plan."""

from __future__ import annotations

import pytest

from stratagem.errors import NotFoundError
from stratagem.observe.monitoring.html_report import load_run, tiles_of
from tests.unit.observe.goodput.runs import process, run, straggling, write


def test_figures_of_a_run(tmp_path) -> None:
    write(tmp_path, straggling())
    tiles = {label: (value, remark) for label, value, remark in tiles_of(load_run(tmp_path))}
    assert tiles["start-up"][0] == "10.0 s"
    assert tiles["steps"] == ("101", "0 run again; 0 failures; 2 workers")
    assert tiles["loss, last"] == ("1", "first recorded: 2")
    assert tiles["host memory, peak"][0] == "300 MiB"
    assert tiles["goodput after start-up"][0].endswith("%")


def test_run_without_steps_has_figures_too(tmp_path) -> None:
    write(tmp_path, run(process("worker 0", 0)))
    tiles = {label: value for label, value, _ in tiles_of(load_run(tmp_path))}
    assert tiles["goodput after start-up"] == "none yet"
    assert tiles["speed, median"] == tiles["loss, last"] == "unknown"
    assert tiles["host memory, peak"] == "-"


@pytest.mark.parametrize(
    ("text", "why"), [("{", "cannot be read"), ("[]", "is no plan"), ("{}", "is no plan")]
)
def test_plan_that_cannot_be_read_is_named(tmp_path, text, why) -> None:
    write(tmp_path, straggling())
    (tmp_path / "plan.json").write_text(text)
    found = load_run(tmp_path)
    assert found.plan is None
    assert why in found.plan_problem


def test_folder_without_events_is_named(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="has no events"):
        load_run(tmp_path)

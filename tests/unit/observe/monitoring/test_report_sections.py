"""Sections of a report have a cell per run."""

from __future__ import annotations

from stratagem.observe.monitoring.html_report import Cell, load_run, sections_of
from tests.unit.observe.goodput.runs import gang_restart, straggling, write


def test_two_runs_have_a_cell_each(tmp_path) -> None:
    for name, events in (("a", straggling()), ("b", gang_restart())):
        write(tmp_path / name, events)
    sections = sections_of([load_run(tmp_path / "a"), load_run(tmp_path / "b")])
    assert {len(section.cells) for section in sections} == {2}
    assert len({section.title for section in sections}) == len(sections) == 10
    found = {section.title: section.cells for section in sections}
    assert all(isinstance(cell, Cell) for cells in found.values() for cell in cells)
    assert found["Failures and restarts"][0].empty
    assert found["Failures and restarts"][1].rows

"""Cells with charts, and reasons for empty ones."""

from __future__ import annotations

from stratagem.observe.monitoring.charts import TimeFrame
from stratagem.observe.monitoring.html_report import (
    Cell,
    load_run,
    members_cell,
    memory_cell,
    speed_cell,
    time_cell,
    values_cell,
)
from tests.unit.observe.goodput.runs import (
    gang_restart,
    members_come_and_go,
    process,
    run,
    straggling,
    write,
)


def made(cell, folder, events) -> Cell:
    write(folder, events)
    return cell(load_run(folder), TimeFrame(100.0, []))


CHARTS = (time_cell, values_cell, speed_cell, memory_cell)


def test_cells_of_a_full_run_hold_charts(tmp_path) -> None:
    for number, cell in enumerate(CHARTS):
        found = made(cell, tmp_path / str(number), straggling())
        assert found.charts
        assert not found.empty


def test_causes_are_in_a_table_with_their_colors(tmp_path) -> None:
    found = made(time_cell, tmp_path, gang_restart())
    rows = {row[0]: row[1:3] for row in found.rows}
    assert rows["start-up"] == ("10.0 s", "12.8%")
    assert rows["repeated"] == ("10.0 s", "12.8%")
    assert ("cause-starting", "start-up") in found.legend


def test_empty_cells_say_why_and_how_to_fill_them(tmp_path) -> None:
    alone = run(process("worker 0", 0))
    assert "sg.goodput.progress" in made(values_cell, tmp_path / "a", alone).empty
    assert "sg.goodput.step" in made(speed_cell, tmp_path / "b", alone).empty
    assert "STRATAGEM_RUN_DIR" in made(memory_cell, tmp_path / "d", alone).empty


def test_changes_of_members_are_in_a_table(tmp_path) -> None:
    found = made(members_cell, tmp_path / "a", members_come_and_go())
    assert len(found.charts) == 1
    assert found.rows[:2] == (
        ("20.0 s", "worker 1", "-", "2 of 3", "250 ms", "1.0 s"),
        ("30.0 s", "-", "worker 1", "3 of 3", "250 ms", "500 ms"),
    )
    assert len(found.rows) == 4
    assert "ElasticStrategy" in made(members_cell, tmp_path / "b", gang_restart()).empty

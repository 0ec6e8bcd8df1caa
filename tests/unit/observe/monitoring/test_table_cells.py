"""Cells with tables, and reasons for empty ones."""

from __future__ import annotations

import json

from stratagem.observe.monitoring.charts import TimeFrame
from stratagem.observe.monitoring.html_report import (
    Cell,
    failure_cell,
    load_run,
    plan_cell,
    save_cell,
    warning_cell,
)
from tests.unit.observe.goodput.runs import (
    end,
    gang_restart,
    process,
    run,
    save,
    straggling,
    warning,
    write,
)


def made(cell, folder, events) -> Cell:
    write(folder, events)
    return cell(load_run(folder), TimeFrame(100.0, []))


def test_failures_and_restarts_are_in_order(tmp_path) -> None:
    assert made(failure_cell, tmp_path, gang_restart()).rows == (
        ("45.0 s", "failure 1: worker 1 lost", "5.0 s", "13.0 s"),
        ("47.0 s", "restart 1: worker 1 failed", "", ""),
    )


def test_checkpoints_have_their_stalls(tmp_path) -> None:
    lines = (*save(3, 5, 7), *save(8, 9, 9, failed="disk full"), end(9))
    found = made(save_cell, tmp_path, run(process("worker 0", 0, *lines)))
    assert found.rows[0] == ("5.0 s", "7", "2.0 s", "2.0 s", "written")
    assert found.rows[1][-1] == "failed: disk full"
    assert found.note.startswith("2 checkpoints, 3.0 s of stalls.")


def test_warnings_name_their_processes(tmp_path) -> None:
    (row,) = made(warning_cell, tmp_path, straggling()).rows
    assert row == ("12.0 s", "worker 0, worker 1", "UserWarning", "slow <data>", "train.py:3")


def test_only_the_first_of_many_rows_are_shown(tmp_path) -> None:
    many = (warning(number, f"number {number}") for number in range(1, 31))
    found = made(warning_cell, tmp_path, run(process("worker 0", 0, *many)))
    assert (len(found.rows), found.note) == (20, "10 more are left out.")


def test_plan_is_beside_the_measurement(tmp_path) -> None:
    plan = {
        "target": "8xH100",
        "num_devices": 8,
        "global_batch": 800,
        "memory": {"total_bytes": 2 * 1024**3},
        "scaling": [{"num_devices": 1, "step_s": 9.0}, {"num_devices": 8, "step_s": 0.25}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    rows = made(plan_cell, tmp_path, straggling()).rows
    assert rows[0][1] == "8xH100"
    assert rows[1] == ("time of a step", "250 ms", "200 ms")
    assert rows[2][:2] == ("examples", "3,200/s")
    assert rows[3] == ("memory per device", "2.0 GiB", "0 MiB")


def test_empty_cells_say_why_and_how_to_fill_them(tmp_path) -> None:
    alone = run(process("worker 0", 0))
    assert "sg.BackupAndRestore" in made(save_cell, tmp_path / "a", alone).empty
    assert "stratagem plan --target TARGET" in made(plan_cell, tmp_path / "b", alone).empty
    assert made(failure_cell, tmp_path / "c", alone).empty
    assert made(warning_cell, tmp_path / "d", alone).empty

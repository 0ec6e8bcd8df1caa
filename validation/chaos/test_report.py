"""Reports of campaigns: faults are counted by kind and by the outcome of their trial."""

from __future__ import annotations

import io

import rich.console

from validation.chaos import report

_KILLED = {"kind": "SIGKILL", "where": "worker 1", "detected_s": 1.0, "resumed_s": 3.0}
_FULL = {"kind": "disk full", "where": "the job's folder", "detected_s": None, "resumed_s": None}
RESULTS = [
    {"outcome": "identical", "faults": [_KILLED, _FULL]},
    {"outcome": "hang", "faults": [_KILLED | {"where": "worker 2", "detected_s": 5.0}]},
]


def test_table_has_a_row_for_each_kind() -> None:
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(report.table(RESULTS))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in lines if "│" in line}
    assert [cell.strip() for cell in rows["SIGKILL: worker"]] == [
        *("1", "", "", "", "1", "", "", ""),
        *("3.0 / 5.0", "3.0 / 3.0"),
    ]
    assert [cell.strip() for cell in rows["disk full"]][:2] == ["1", ""]


def test_plot_is_drawn(tmp_path) -> None:
    report.plot(RESULTS, tmp_path / "times.png")
    assert (tmp_path / "times.png").stat().st_size > 1000

"""Figures, table and picture of killed processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console

from benchmarks.parameter_server_failures.report import (
    Resumed,
    draw_rates,
    gaps_of,
    make_table,
    rates_of,
    rows_of,
)

# Two a second; nothing from 10.5 to 13.5; again two a second.
ENDS = [100.0 + one / 2 for one in (*range(22), *range(27, 61))]
WORKERS: dict[str, Any] = {
    "begin_s": 100.0,
    "kills": [[105.0, 0, 11], [110.5, 1, 12]],
    "ends": ENDS,
    "returns": [0.5, 3.0],
    "cpu_s": [0.25, 0.35],
    "num_functions": 56,
    "num_wrong": 0,
    "num_never_run": 0,
    "num_runs": 59,
    "counted": 165.0,
    "to_count": 165.0,
}
SERVERS: dict[str, Any] = {
    "begin_s": 100.0,
    "kills": [[105.0, 0, 11], [110.5, 1, 12]],
    "ends": ENDS,
    "num_steps": 56,
    "lost": [4, 3],
    "told_lost": 7,
}


def _texts(*arguments: Any) -> dict[tuple[str, str], tuple[str, bool | None]]:
    return {(row.case, row.what): (row.text, row.is_good) for row in rows_of(*arguments)}


def test_rates_are_of_whole_seconds() -> None:
    assert rates_of(WORKERS) == [2] * 10 + [2, 0, 0, 1] + [2] * 16


def test_gaps_are_the_longest_time_without_a_step() -> None:
    assert gaps_of(SERVERS) == [3.0, 3.0]
    assert gaps_of({**SERVERS, "kills": [[120.0, 0, 11]]}) == [0.5]
    assert gaps_of({**SERVERS, "ends": [100.0]}) == [20.0, 20.0]


def test_figures_say_what_was_lost() -> None:
    told = _texts(WORKERS, SERVERS, Resumed(100, [90, 80], 4.0, 0.5))
    assert told["workers", "functions that never ran, or wrong"] == ("0 and 0 of 56", True)
    assert told["workers", "functions that ran again"] == ("3", None)
    assert told["workers", "counted in a metric"] == ("165 of 165", True)
    assert told["workers", "functions/s before"] == ("2", None)
    assert told["workers", "return, median"] == ("1.75 s", None)
    assert told["workers", "return, worst"] == ("3.00 s", None)
    assert told["server", "no step, worst"] == ("3.00 s", True)
    assert told["server", "updates lost"] == ("7 of 112", None)
    assert told["server", "told to be lost"] == ("7", None)
    assert told["coordinator", "updates lost"] == ("20", None)
    assert told["coordinator", "goes on after"] == ("100 with 80 updates", True)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_wrong": 1}, "functions that never ran, or wrong"),
        ({"num_never_run": 1}, "functions that never ran, or wrong"),
        ({"counted": 166.0}, "counted in a metric"),
    ],
)
def test_what_is_not_as_promised_is_bad(change: dict[str, Any], what: str) -> None:
    assert _texts({**WORKERS, **change}, None, None)["workers", what][1] is False


def test_coordinator_that_begins_anew_is_bad() -> None:
    resumed = Resumed(100, [0, 90], 4.0, 0.5)
    assert _texts(None, None, resumed)["coordinator", "goes on after"][1] is False
    assert dataclasses.replace(resumed, restored=[101, 102]).num_lost == 0


def test_table_and_picture_are_made(tmp_path) -> None:
    console = Console(record=True, width=120)
    console.print(make_table(rows_of(WORKERS, SERVERS, None)))
    assert "56" in console.export_text()
    path = tmp_path / "new" / "picture.png"
    draw_rates(path, {"Functions": WORKERS, "Steps": SERVERS}, "a machine")
    assert path.read_bytes().startswith(b"\x89PNG")

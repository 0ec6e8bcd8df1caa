"""Command: tables and a plot of the results: `python -m benchmarks.gpu.report results.json`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.models import MODELS
from benchmarks.gpu.plot import draw_speeds
from benchmarks.gpu.sides import SIDES, WORKLOAD_NAMES
from benchmarks.gpu.wanted import WANTED, Reached, mfu, reached

__all__ = ["main", "speed_rows", "tables"]

_TITLES = {**{name: model.title for name, model in MODELS.items()}, "checkpoint": "Checkpoint"}


def speed_rows(results: Mapping[str, Any], workload: str) -> list[dict[str, Any]]:
    """Returns a row for each measured side: units per second in each round, and MFU.

    Args:
        results: of `results.json`.
        workload: whose sides.
    """
    rows: list[dict[str, Any]] = []
    for side in results["sides"]:
        if side["workload"] != workload or side["is_cold"] or not side.get("steps_per_s"):
            continue
        speeds = [one * side["units_per_step"] for one in side["steps_per_s"]]
        rows.append({**side, "speeds": speeds, "median": statistics.median(speeds)})
        rows[-1]["mfu"] = mfu(rows[-1])
    return sorted(rows, key=lambda row: not row["is_ours"])


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Returns a table of each workload, those of first steps and saves, and wanted beside reached.

    Args:
        results: of `results.json`.
    """
    made = [_speeds(results, name) for name in WORKLOAD_NAMES if speed_rows(results, name)]
    if any(side.get("saves") for side in results["sides"]):
        made.append(_saves(results))
    made.append(_first_steps(results))
    made.append(_wanted(results))
    missing = [side for side in results["sides"] if side["status"] != "done"]
    if missing:
        made.append(_missing(missing))
    return made


def _speeds(results: Mapping[str, Any], workload: str) -> Table:
    rows = speed_rows(results, workload)
    ours = [row for row in rows if row["is_ours"]]
    unit = MODELS[workload].unit
    table = Table(title=f"{_TITLES[workload]}: {unit}/s", title_justify="left")
    table.add_column("side")
    headers = ["median", "min", "max", "MFU", "peak, GB", "first loss", "last loss"]
    headers += [f"{row['name']} / this" for row in ours]
    for header in headers:
        table.add_column(header, justify="right")
    for row in rows:
        cells = [f"{value:,.1f}" for value in (row["median"], min(row["speeds"]))]
        cells.append(f"{max(row['speeds']):,.1f}")
        cells.append("" if row["mfu"] is None else f"{row['mfu']:.1%}")
        cells.append(_gigabytes(row))
        cells += [f"{row['first_loss']:.3f}", f"{row['last_loss']:.3f}"]
        cells += ["" if row["is_ours"] else f"{one['median'] / row['median']:.3f}" for one in ours]
        table.add_row(row["name"], *cells)
    return table


def _saves(results: Mapping[str, Any]) -> Table:
    table = Table(title="Asynchronous saves while steps run", title_justify="left")
    table.add_column("side")
    for header in ("save", "GB", "step, ms", "stall, s", "longest step, s", "all delays, s"):
        table.add_column(header, justify="right")
    table.add_column("written after, s", justify="right")
    for side in results["sides"]:
        for number, save in enumerate(side.get("saves") or [], 1):
            table.add_row(
                side["name"],
                str(number),
                f"{save['state_bytes'] / 1e9:g}",
                f"{save['step_s'] * 1e3:.1f}",
                *(f"{save[key]:.3f}" for key in ("stall_s", "longest_step_s", "delay_s")),
                f"{save['whole_s']:.1f}" + ("" if save["is_written"] else " (not written)"),
            )
    return table


def _first_steps(results: Mapping[str, Any]) -> Table:
    title = "First step, compilation, peak memory of the device"
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    table.add_column("side")
    table.add_column("cache of programs")
    for header in ("from process start, s", "the call, s", "compilation, s", "peak, GB"):
        table.add_column(header, justify="right")
    for side in results["sides"]:
        if side.get("first_step_s") is None:
            continue
        compile_s = side.get("compile_s")
        table.add_row(
            _TITLES[side["workload"]],
            side["name"],
            "empty" if side["is_cold"] else "as it was",
            f"{side['first_step_s']:.1f}",
            f"{side['first_call_s']:.1f}",
            "" if compile_s is None else f"{compile_s:.1f}",
            _gigabytes(side),
        )
    return table


def _gigabytes(side: Mapping[str, Any]) -> str:
    peak_bytes = side.get("peak_bytes")
    return "" if peak_bytes is None else f"{peak_bytes / 1e9:.2f}"


def _wanted(results: Mapping[str, Any]) -> Table:
    table = Table(title="Wanted and reached", title_justify="left")
    table.add_column("what")
    table.add_column("wanted", justify="right")
    table.add_column("reached", justify="right")
    table.add_column("")
    for one in _reached(results):
        sign = "at least" if one.goal.is_least else "at most"
        value = "not measured" if one.value is None else f"{one.value:,.3f}"
        verdict = "" if one.value is None else ("yes" if one.is_met else "no")
        table.add_row(one.goal.title, f"{sign} {one.goal.bound:g}", value, verdict)
    return table


def _reached(results: Mapping[str, Any]) -> list[Reached]:
    """Returns the goals of the workloads that were run, and what was reached."""
    run = {side["workload"] for side in results["sides"]}
    keys = {side.key for side in SIDES if side.workload in run}
    return [reached(goal, results) for goal in WANTED if goal.ours in keys]


def _missing(sides: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Not measured, or not to the end", title_justify="left")
    table.add_column("side")
    table.add_column("why")
    for side in sides:
        table.add_row(side["key"] + (" (cold)" if side["is_cold"] else ""), side["status"])
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints tables, and writes them and a plot into a folder.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="results.json, of several runs too")
    parser.add_argument("--output", type=Path, required=True, help="folder of tables and plot")
    parsed = parser.parse_args(arguments)
    results = _joined([json.loads(path.read_text(encoding="utf-8")) for path in parsed.results])
    parsed.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=250, record=True)
    for table in tables(results):
        console.print(table)
    (parsed.output / "tables.txt").write_text(console.export_text(), encoding="utf-8")
    speeds = {name: speed_rows(results, name) for name in WORKLOAD_NAMES}
    draw_speeds(parsed.output / "speeds.png", {k: v for k, v in speeds.items() if v}, _TITLES)


def _joined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins runs: of a side measured twice, the last that was done."""
    sides: dict[Any, Any] = {}
    for run in runs:
        for side in run["sides"]:
            key = side["key"], side["is_cold"]
            if key not in sides or side["status"] == "done":
                sides[key] = side
    return {**runs[0], "sides": list(sides.values())}


if __name__ == "__main__":
    main()

"""Sections of a report: a title, the way to read it, and a cell per run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from stratagem.observe.monitoring.cell import Cell
from stratagem.observe.monitoring.chart_cells import (
    members_cell,
    memory_cell,
    speed_cell,
    time_cell,
    values_cell,
)
from stratagem.observe.monitoring.charts import TimeFrame
from stratagem.observe.monitoring.reported_run import ReportedRun
from stratagem.observe.monitoring.straggler_cell import straggler_cell
from stratagem.observe.monitoring.table_cells import (
    failure_cell,
    plan_cell,
    save_cell,
    warning_cell,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report, with one cell per run."""

    title: str
    reading: str
    cells: tuple[Cell, ...]


_SECTIONS: tuple[tuple[str, str, Callable[[ReportedRun, TimeFrame], Cell]], ...] = (
    (
        "Where the time went",
        "Colors are the causes of the table; dashed red lines are failures. "
        "The line is goodput after start-up, from the first start to that moment.",
        time_cell,
    ),
    (
        "Loss and metrics",
        "As training reported them: at the end of each epoch, and of steps every few seconds.",
        values_cell,
    ),
    (
        "Speed",
        "Steps per second, including steps that were lost and run again. "
        "It is 0 where no step ended.",
        speed_cell,
    ),
    (
        "Members",
        "Workers that train in an elastic group. Triangles are losses and joins. Training stands "
        "still from the last step before a change to the first one after it, less the time of a "
        "step.",
        members_cell,
    ),
    (
        "Stragglers",
        "The redder, the longer a worker keeps the others waiting in each step by its own work. "
        "Workers without red wait for the red one. Columns up to the transfer are means of a "
        "step. A slow link lengthens the transfer of all.",
        straggler_cell,
    ),
    (
        "Failures and restarts",
        "Times are from the first start. Detection runs from the last step to the "
        "first report, and resuming from there to the next step.",
        failure_cell,
    ),
    (
        "Memory",
        "Resident memory of each process on its host, and memory in use on its fullest "
        "device, every five seconds.",
        memory_cell,
    ),
    (
        "Checkpoints",
        "The stall is the time that training waited, in the slowest process.",
        save_cell,
    ),
    (
        "Plan and measurement",
        "A plan is a prediction for its own target; compare it with a run there.",
        plan_cell,
    ),
    (
        "Warnings",
        "Warnings of Python and log records from WARNING on, each text once.",
        warning_cell,
    ),
)


def sections_of(runs: Sequence[ReportedRun]) -> list[Section]:
    """Returns the sections; the charts of all runs have the same axes of time and speed."""
    whole_s = max(one.account.whole_s for one in runs)
    top_speed = max((value for one in runs for value in one.series.speed.values), default=1.0)
    frames = [
        TimeFrame(whole_s, [failure.told_s for failure in one.account.failures], top_speed)
        for one in runs
    ]
    pairs = list(zip(runs, frames, strict=True))
    return [
        Section(title=title, reading=reading, cells=tuple(cell(*pair) for pair in pairs))
        for title, reading, cell in _SECTIONS
    ]

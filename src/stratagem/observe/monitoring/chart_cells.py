"""Cells with charts: time, values, speed, members and memory."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.observe.goodput.report import CAUSE_MEANINGS, duration_text
from stratagem.observe.goodput.time_spans import CAUSES
from stratagem.observe.monitoring.cell import Cell
from stratagem.observe.monitoring.charts import (
    TimeFrame,
    cause_role,
    line_chart,
    members_chart,
    time_chart,
)
from stratagem.observe.monitoring.reported_run import ReportedRun
from stratagem.observe.monitoring.run_series import Line

_MAX_ROWS = 20


def time_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows causes over time, and goodput."""
    account = one.account
    shown = [cause for cause in CAUSES if account.time_s[cause] > 0]
    names = {cause: "start-up" if cause == "starting" else cause for cause in CAUSES}
    rows = tuple(
        (
            names[cause],
            duration_text(account.time_s[cause]),
            f"{account.time_s[cause] / (account.whole_s or 1.0):.1%}",
            CAUSE_MEANINGS[cause].removeprefix("start-up: "),
        )
        for cause in shown
    )
    return Cell(
        charts=(time_chart(account, frame),),
        legend=tuple((cause_role(cause), names[cause]) for cause in shown),
        headers=("cause", "time", "share", "meaning"),
        rows=rows,
        note=" ".join(f"Unreadable: {problem}" for problem in one.run.problems),
    )


def values_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows loss and metrics over time."""
    series = one.series
    if not series.values:
        return Cell(
            empty="No values were recorded. `fit` records them at the end of each epoch; in your "
            'own loop, call sg.goodput.progress({"loss": loss}).'
        )
    loss = {name: line for name, line in series.values.items() if "loss" in name}
    others = {name: line for name, line in series.values.items() if "loss" not in name}
    drawn = [
        line_chart(lines, frame, label)
        for lines, label in (
            (loss, "loss"),
            (others, "metrics" if len(others) > 1 else min(others, default="")),
        )
        if lines
    ]
    return Cell(charts=tuple(drawn))


def speed_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows steps per second over time."""
    series = one.series
    if not series.speed.values:
        return Cell(
            empty="No step ended after the first. `fit` records steps; in your own loop, call "
            "sg.goodput.step(step)."
        )
    drawn = line_chart(
        {"speed": series.speed}, frame, "steps/s", top=frame.top_speed, is_stepped=True
    )
    return Cell(charts=(drawn,))


def members_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows the members of an elastic group over time, and each change of them."""
    changes = one.account.member_changes
    if not changes:
        return Cell(empty="This run has no ElasticStrategy, whose members may change.")
    rows = [
        (
            duration_text(change.at_s),
            ", ".join(change.lost) or "-",
            ", ".join(change.joined) or "-",
            f"{change.num_members} of {change.num_expected}",
            duration_text(change.change_s),
            "unknown" if change.pause_s is None else duration_text(change.pause_s),
        )
        for change in changes
        if change.cause is not None
    ]
    more = len(rows) - _MAX_ROWS
    return Cell(
        charts=(members_chart(changes, frame, one.account.whole_s),),
        legend=(("failure", "lost"), ("cause-useful", "joined")),
        headers=("at", "lost", "joined", "members", "change of the group", "training stood still"),
        rows=tuple(rows[:_MAX_ROWS]),
        note=f"{more} more are left out." if more > 0 else "",
    )


def memory_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows memory of hosts and devices over time."""
    series = one.series
    if not series.host_memory and not series.device_memory:
        return Cell(
            empty="No memory was recorded. Processes sample it by themselves if STRATAGEM_RUN_DIR "
            "is set when they start."
        )
    drawn = [
        line_chart(_in_gib(lines), frame, label)
        for lines, label in (
            (series.host_memory, "host\nGiB"),
            (series.device_memory, "device\nGiB"),
        )
        if lines
    ]
    note = "" if series.device_memory else "Devices reported no memory, as CPUs do not."
    return Cell(charts=tuple(drawn), note=note)


def _in_gib(lines: Mapping[str, Line]) -> dict[str, Line]:
    return {
        name: Line(line.times_s, tuple(value / 1024**3 for value in line.values))
        for name, line in lines.items()
    }

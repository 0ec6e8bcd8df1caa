"""Sections of a report: a title, the way to read it, and a cell per run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.goodput import CAUSES, Account, RunEvents, account_for, read_run
from stratagem.goodput.failures import Failure
from stratagem.goodput.report import CAUSE_MEANINGS, duration_text
from stratagem.monitoring import charts
from stratagem.monitoring.charts import TimeFrame
from stratagem.monitoring.run_series import Line, RunSeries, series_of
from stratagem.monitoring.terminal_view import bytes_text
from stratagem.run_events.records import RestartEvent

__all__ = ["Cell", "ReportedRun", "Section", "load_run", "sections_of", "tiles_of"]

PLAN_FILE = "plan.json"
_MAX_ROWS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Content of a section for one run: charts and a table, or the reason why it is empty."""

    charts: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()  # role of the color, and text
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    empty: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report, with one cell per run."""

    title: str
    reading: str
    cells: tuple[Cell, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run that a report shows. `plan` is the JSON of `stratagem plan`, or None."""

    name: str
    run: RunEvents
    account: Account
    series: RunSeries
    plan: dict[str, Any] | None
    plan_problem: str


def load_run(run_dir: Path) -> ReportedRun:
    """Reads a run and computes what a report shows; raises NotFoundError without events."""
    run = read_run(run_dir)
    account = account_for(run)
    plan, problem = _read_plan(run_dir / PLAN_FILE)
    return ReportedRun(
        name=str(run_dir),
        run=run,
        account=account,
        series=series_of(run, account.begin_s, account.whole_s),
        plan=plan,
        plan_problem=problem,
    )


def tiles_of(one: ReportedRun) -> list[tuple[str, str, str]]:
    """Returns the most important figures: a label, a value, and a remark."""
    account, series = one.account, one.series
    after, useful = account.goodput_after_startup, duration_text(account.time_s["useful"])
    rest = duration_text(account.whole_s - account.startup_s)
    speeds = [value for value in series.speed.values if value > 0]
    loss = series.values.get("loss")
    peak = max((max(line.values) for line in series.host_memory.values()), default=None)
    num_workers = len({process.task for process in one.run.processes if process.trains})
    return [
        (
            "goodput after start-up",
            "none yet" if after is None else f"{after:.1%}",
            f"{useful} useful of {rest}",
        ),
        (
            "start-up",
            duration_text(account.startup_s),
            f"imports and first compilation; with it, goodput is {account.goodput:.1%} "
            f"of {duration_text(account.whole_s)}",
        ),
        (
            "steps",
            f"{account.num_steps:,}",
            f"{account.num_repeated} run again; {_count(len(account.failures), 'failure')}; "
            f"{_count(num_workers, 'worker')}",
        ),
        (
            "speed, median",
            f"{sorted(speeds)[len(speeds) // 2]:.3g}/s" if speeds else "unknown",
            "steps per second while steps run",
        ),
        (
            "loss, last",
            "unknown" if loss is None else f"{loss.values[-1]:.4g}",
            "" if loss is None else f"first recorded: {loss.values[0]:.4g}",
        ),
        ("host memory, peak", bytes_text(None if peak is None else int(peak)), "largest process"),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def sections_of(runs: Sequence[ReportedRun]) -> list[Section]:
    """Returns the sections; the charts of all runs have the same axes."""
    whole_s = max(one.account.whole_s for one in runs)
    frames = [TimeFrame(whole_s, [failure.told_s for failure in one.account.failures]) for one in runs]
    pairs = list(zip(runs, frames, strict=True))
    top_speed = max((value for one in runs for value in one.series.speed.values), default=1.0)
    return [
        Section(
            title="Where the time went",
            reading="Colors are the causes of the table; dashed red lines are failures. "
            "The line is goodput after start-up, from the first start to that moment.",
            cells=tuple(_time_cell(one, frame) for one, frame in pairs),
        ),
        Section(
            title="Loss and metrics",
            reading="As training reported them: at the end of each epoch, and of steps every few "
            "seconds.",
            cells=tuple(_values_cell(one.series, frame) for one, frame in pairs),
        ),
        Section(
            title="Speed",
            reading="Steps per second, including steps that were lost and run again. "
            "It is 0 where no step ended.",
            cells=tuple(_speed_cell(one.series, frame, top_speed) for one, frame in pairs),
        ),
        Section(
            title="Stragglers",
            reading="The redder, the longer a worker keeps the others waiting in each step: its "
            "time on the host (data, Python) beyond the fastest worker's. Workers without red wait "
            "for the red one.",
            cells=tuple(_straggler_cell(one, frame) for one, frame in pairs),
        ),
        Section(
            title="Failures and restarts",
            reading="Times are from the first start. Detection runs from the last step to the first "
            "report, and resuming from there to the next step.",
            cells=tuple(_failure_cell(one) for one in runs),
        ),
        Section(
            title="Memory",
            reading="Resident memory of each process on its host, and memory in use on its fullest "
            "device, every five seconds.",
            cells=tuple(_memory_cell(one.series, frame) for one, frame in pairs),
        ),
        Section(
            title="Checkpoints",
            reading="The stall is the time that training waited, in the slowest process.",
            cells=tuple(_save_cell(one.series) for one in runs),
        ),
        Section(
            title="Plan and measurement",
            reading="A plan is a prediction for its own target; compare it with a run there.",
            cells=tuple(_plan_cell(one) for one in runs),
        ),
        Section(
            title="Warnings",
            reading="Warnings of Python and log records from WARNING on, each text once.",
            cells=tuple(_warning_cell(one) for one in runs),
        ),
    ]


def _time_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
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
        charts=(charts.time_chart(account, frame),),
        legend=tuple((f"cause-{cause}", names[cause]) for cause in shown),
        headers=("cause", "time", "share", "meaning"),
        rows=rows,
        note=" ".join(f"Unreadable: {problem}" for problem in one.run.problems),
    )


def _values_cell(series: RunSeries, frame: TimeFrame) -> Cell:
    if not series.values:
        return Cell(
            empty="No values were recorded. `fit` records them at the end of each epoch; in your "
            'own loop, call sg.goodput.progress({"loss": loss}).'
        )
    loss = {name: line for name, line in series.values.items() if "loss" in name}
    others = {name: line for name, line in series.values.items() if "loss" not in name}
    drawn = [
        charts.line_chart(lines, frame, label)
        for lines, label in ((loss, "loss"), (others, "metrics" if len(others) > 1 else min(others, default="")))
        if lines
    ]
    return Cell(charts=tuple(drawn))


def _speed_cell(series: RunSeries, frame: TimeFrame, top: float) -> Cell:
    if not series.speed.values:
        return Cell(
            empty="No step ended after the first. `fit` records steps; in your own loop, call "
            "sg.goodput.step(step)."
        )
    drawn = charts.line_chart({"speed": series.speed}, frame, "steps/s", top=top, is_stepped=True)
    return Cell(charts=(drawn,))


def _straggler_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    stragglers = one.series.stragglers
    if stragglers is not None:
        drawn = charts.straggler_chart(stragglers, frame, one.account.whole_s)
        longest = duration_text(stragglers.longest_s)
        return Cell(charts=(drawn,), note=f"Darkest: {longest} per step.")
    if len({process.task for process in one.run.processes if process.trains}) < 2:
        return Cell(empty="A run of one worker has no stragglers.")
    return Cell(
        empty=f"{one.series.num_unmeasured} lines of steps have no measured waits. `fit` measures "
        "them; in your own loop, pass waited_s to the step method of sg.goodput.current_events()."
    )


def _failure_cell(one: ReportedRun) -> Cell:
    rows = [
        (failure.told_s, _failure_row(number, failure))
        for number, failure in enumerate(one.account.failures, start=1)
    ]
    for process in one.run.processes:
        for event in process.events:
            if isinstance(event, RestartEvent):
                at_s = process.at_s(event) - one.account.begin_s
                what = f"restart {event.attempt}: {event.cause}"
                rows.append((at_s, (duration_text(at_s), what, "", "")))
    if not rows:
        return Cell(empty="No failure and no restart was recorded.")
    ordered = [row for _, row in sorted(rows)]
    return Cell(
        headers=("at", "event", "to detect", "to resume"),
        rows=tuple(ordered[:_MAX_ROWS]),
        note=_left_out(ordered),
    )


def _failure_row(number: int, failure: Failure) -> tuple[str, ...]:
    times_s = (failure.detect_s, failure.resume_s)
    return (
        duration_text(failure.told_s),
        f"failure {number}: {failure.what}",
        *("unknown" if one is None else duration_text(one) for one in times_s),
    )


def _memory_cell(series: RunSeries, frame: TimeFrame) -> Cell:
    if not series.host_memory and not series.device_memory:
        return Cell(
            empty="No memory was recorded. Processes sample it by themselves if STRATAGEM_RUN_DIR "
            "is set when they start."
        )
    drawn = [
        charts.line_chart(_in_gib(lines), frame, label)
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


def _save_cell(series: RunSeries) -> Cell:
    if not series.saves:
        return Cell(
            empty="No checkpoint was written. sg.BackupAndRestore and sg.train.CheckpointManager "
            "record theirs."
        )
    rows = [
        (
            duration_text(save.at_s),
            f"{save.step:,}",
            duration_text(save.stall_s),
            duration_text(save.duration_s),
            f"failed: {save.failed}" if save.failed is not None else "written",
        )
        for save in series.saves
    ]
    stalls = duration_text(sum(save.stall_s for save in series.saves))
    return Cell(
        headers=("at", "step", "stall", "duration", "result"),
        rows=tuple(rows[:_MAX_ROWS]),
        note=f"{len(rows)} checkpoints, {stalls} of stalls. {_left_out(rows)}",
    )


def _plan_cell(one: ReportedRun) -> Cell:
    plan = one.plan
    if plan is None:
        return Cell(
            empty=one.plan_problem
            or f"The run folder has no {PLAN_FILE}. Write it with: stratagem plan --target TARGET "
            f"--json {one.name}/{PLAN_FILE} SCRIPT"
        )
    num_devices = plan.get("num_devices")
    times = [row for row in plan.get("scaling", ()) if row.get("num_devices") == num_devices]
    step_s = one.series.step_s
    used = [max(line.values) for line in one.series.device_memory.values()]
    batch = plan.get("global_batch")
    speed = [value for value in one.series.speed.values if value > 0]
    measured_rate = "unknown"
    if batch and speed:
        measured_rate = f"{batch * sorted(speed)[len(speed) // 2]:,.0f}/s"
    planned_s = times[0].get("step_s") if times else None
    return Cell(
        headers=("", "plan", "measured"),
        rows=(
            ("hardware", str(plan.get("target")), "see the machines of this run"),
            (
                "time of a step",
                "unknown" if planned_s is None else f"{1000 * planned_s:.3g} ms",
                "unknown" if step_s is None else f"{1000 * step_s:.3g} ms",
            ),
            (
                "examples",
                "unknown" if not (batch and planned_s) else f"{batch / planned_s:,.0f}/s",
                measured_rate,
            ),
            (
                "memory per device",
                bytes_text(plan.get("memory", {}).get("total_bytes")),
                bytes_text(int(max(used))) if used else "not reported by the devices",
            ),
        ),
    )


def _warning_cell(one: ReportedRun) -> Cell:
    warnings = one.series.warnings
    if not warnings:
        return Cell(empty="No warning was recorded.")
    rows = [
        (
            duration_text(row.at_s),
            ", ".join(row.tasks[:4]) + (" ..." if len(row.tasks) > 4 else ""),
            row.category,
            row.text,
            row.origin,
        )
        for row in warnings
    ]
    return Cell(
        headers=("at", "process", "kind", "warning", "origin"),
        rows=tuple(rows[:_MAX_ROWS]),
        note=_left_out(rows),
    )


def _left_out(rows: Iterable[object]) -> str:
    more = len(list(rows)) - _MAX_ROWS
    return f"{more} more are left out." if more > 0 else ""


def _read_plan(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Returns the plan, and the reason if a file is there and none can be read."""
    if not path.exists():
        return None, ""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"{path} cannot be read: {error}"
    if not isinstance(plan, dict) or "num_devices" not in plan:
        return None, f"{path} is no plan written by `stratagem plan --json`."
    return plan, ""

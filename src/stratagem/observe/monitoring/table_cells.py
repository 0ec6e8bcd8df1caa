"""Cells with tables: failures, checkpoints, the plan and warnings."""

from __future__ import annotations

from collections.abc import Sized

from stratagem.observe.goodput.failures import Failure
from stratagem.observe.goodput.report import duration_text
from stratagem.observe.monitoring.cell import Cell
from stratagem.observe.monitoring.charts import TimeFrame
from stratagem.observe.monitoring.reported_run import PLAN_FILE, ReportedRun
from stratagem.observe.monitoring.terminal_view import bytes_text
from stratagem.observe.run_events.records import RestartEvent

_MAX_ROWS = 20


def failure_cell(one: ReportedRun, _frame: TimeFrame) -> Cell:
    """Lists failures and restarts."""
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


def save_cell(one: ReportedRun, _frame: TimeFrame) -> Cell:
    """Lists checkpoints."""
    if not one.series.saves:
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
        for save in one.series.saves
    ]
    stalls = duration_text(sum(save.stall_s for save in one.series.saves))
    return Cell(
        headers=("at", "step", "stall", "duration", "result"),
        rows=tuple(rows[:_MAX_ROWS]),
        note=f"{len(rows)} checkpoints, {stalls} of stalls. {_left_out(rows)}",
    )


def plan_cell(one: ReportedRun, _frame: TimeFrame) -> Cell:
    """Shows a plan beside the measurement."""
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


def warning_cell(one: ReportedRun, _frame: TimeFrame) -> Cell:
    """Lists warnings."""
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


def _left_out(rows: Sized) -> str:
    more = len(rows) - _MAX_ROWS
    return f"{more} more are left out." if more > 0 else ""

"""HTML report of a run: one file that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import importlib.resources
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.environment import load
from stratagem.observe.events import RestartEvent, RunEvents, read_run
from stratagem.observe.goodput import CAUSES, Account, MemberChange, account_for
from stratagem.observe.history import Failure
from stratagem.observe.run_series import (
    NUM_COLUMNS,
    Line,
    RunSeries,
    StragglerMap,
    series_of,
)
from stratagem.observe.stragglers import WorkerSummary
from stratagem.observe.terminal import CAUSE_MEANINGS, bytes_text, duration_text
from stratagem.observe.time_plot import CAUSE_COLORS, shares_over_time, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Content of a section: charts and a table, or the reason why it is empty."""

    charts: tuple[str, ...] = ()  # addresses that hold the pictures
    legend: tuple[tuple[str, str], ...] = ()  # color, and text
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    empty: str = ""


# A run with everything that its report shows, and its most important figures.

PLAN_FILE = "plan.json"


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


def _read_plan(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Returns the plan, and the reason if a file is there and none can be read."""
    if not path.exists():
        return None, ""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"{path} cannot be read: {error}"
    if not isinstance(plan, dict) or "num_devices" not in plan:
        return None, f"{path} is no plan written by `stratagem plan --output`."
    return plan, ""


# Charts, as addresses that hold an SVG.

_LINE_COLORS = ("#2a78b9", "#e8862f", "#3a9a5c", "#8a5bb9", "#c8378d", "#4bb4c4", "#8c8c2b")
_TEXT, _FAINT = "#1d2228", "#dfe3e8"
_LOST, _JOINED = CAUSE_COLORS["detecting"], CAUSE_COLORS["useful"]
_WIDTH_IN = 7.2
# The same for all charts, so that their times are below each other.
_LEFT_IN = 1.25
_TOP_IN, _BOTTOM_IN, _GAP_IN = 0.25, 0.45, 0.15
_NUM_TIME_COLUMNS = 400
_MAX_LINES = 12
_MAX_LABELS = 6


class TimeFrame:
    """The axis of time of all charts: its end and unit, and the failures to mark."""

    def __init__(self, whole_s: float, failures_s: Sequence[float]) -> None:
        self.unit_s, self.unit = time_unit(whole_s)
        self.end = max(whole_s / self.unit_s, 1e-9)
        self.failures = [time_s / self.unit_s for time_s in failures_s]


def time_chart(account: Account, frame: TimeFrame) -> str:
    """Draws where the time went, and below it goodput so far after start-up."""

    def draw(axes: Sequence[Axes]) -> None:
        causes, goodput = axes
        shares = shares_over_time(account, _NUM_TIME_COLUMNS)
        width = frame.end / _NUM_TIME_COLUMNS
        edges = [index * width for index in range(_NUM_TIME_COLUMNS + 1)]
        rows = [[*row, row[-1]] for row in shares.values()]
        colors = [CAUSE_COLORS[cause] for cause in CAUSES]
        causes.stackplot(edges, rows, step="post", colors=colors, linewidth=0)
        causes.set_ylim(0, 1)
        causes.set_yticks([])
        for number, failure in enumerate(frame.failures[:_MAX_LABELS], start=1):
            causes.text(failure, 1.05, f"failure {number}", ha="center", va="bottom", fontsize=8)
        causes.set_ylabel("time spent", rotation=0, ha="right", va="center")
        useful, counted = 0.0, 0.0
        so_far: list[float] = []
        for column in range(_NUM_TIME_COLUMNS):
            useful += shares["useful"][column]
            counted += sum(row[column] for row in shares.values()) - shares["starting"][column]
            so_far.append(useful / counted if counted > 1e-9 else math.nan)
        goodput.plot(edges[1:], so_far, color=CAUSE_COLORS["useful"], linewidth=1.8)
        goodput.set_ylim(0, 1.03)
        goodput.set_ylabel("goodput after\nstart-up", rotation=0, ha="right", va="center")

    return _picture(draw, frame, heights=(0.45, 1.0))


def line_chart(
    lines: Mapping[str, Line], frame: TimeFrame, label: str, *, is_stepped: bool = False
) -> str:
    """Draws lines over time from 0 on, with a legend if there are several."""

    def draw(axes: Sequence[Axes]) -> None:
        (chart,) = axes
        for number, (name, line) in enumerate(list(lines.items())[:_MAX_LINES]):
            times = [time_s / frame.unit_s for time_s in line.times_s]
            color = _LINE_COLORS[number % len(_LINE_COLORS)]
            marker = "o" if len(times) < 40 else None
            style: dict[str, Any] = (
                {"drawstyle": "steps-mid"} if is_stepped else {"marker": marker, "ms": 2.5}
            )
            chart.plot(times, line.values, color=color, linewidth=1.6, label=name, **style)
        if len(lines) > 1:
            chart.legend(
                frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1)
            )
        drawn = [one for line in lines.values() for one in line.values if math.isfinite(one)]
        lowest, highest = min([0.0, *drawn]), max([0.0, *drawn])
        chart.set_ylim(1.08 * lowest, 1.08 * highest if highest > lowest else 1.0)
        chart.set_ylabel(label, rotation=0, ha="right", va="center")

    return _picture(draw, frame, heights=(1.3,))


def members_chart(changes: Sequence[MemberChange], frame: TimeFrame) -> str:
    """Draws the number of members over time, with a mark for each loss and each join."""

    def draw(axes: Sequence[Axes]) -> None:
        (chart,) = axes
        times = [change.at_s / frame.unit_s for change in changes]
        numbers = [change.num_members for change in changes]
        chart.step(
            [*times, frame.end],
            [*numbers, *numbers[-1:]],
            where="post",
            color=_LINE_COLORS[0],
            linewidth=1.6,
        )
        most = max(change.num_expected for change in changes)
        for marker, color, height, named in (
            ("v", _LOST, most + 0.35, [change.lost for change in changes]),
            ("^", _JOINED, most + 0.75, [change.joined for change in changes]),
        ):
            marked = [time for time, tasks in zip(times, named, strict=True) if tasks]
            heights = [height] * len(marked)
            chart.plot(marked, heights, marker, color=color, markersize=4, linewidth=0)
        chart.set_ylim(0, most + 1.1)
        chart.set_yticks(range(0, most + 1, 1 + most // 8))
        chart.set_ylabel("members", rotation=0, ha="right", va="center")

    return _picture(draw, frame, heights=(0.9,))


def straggler_chart(stragglers: StragglerMap, frame: TimeFrame) -> str:
    """Draws a row per worker; the redder, the longer it holds up each step."""

    def draw(axes: Sequence[Axes]) -> None:
        (chart,) = axes
        edges = [frame.end * column / NUM_COLUMNS for column in range(NUM_COLUMNS + 1)]
        rows = [number - 0.5 for number in range(len(stragglers.tasks) + 1)]
        chart.pcolormesh(
            edges,
            rows,
            stragglers.delays_s,
            cmap="Reds",
            vmin=0.0,
            vmax=stragglers.longest_s or 1.0,
            rasterized=True,  # a picture in the picture: smaller than a shape for each cell
        )
        chart.invert_yaxis()
        step = 1 + len(stragglers.tasks) // 16
        chart.set_yticks(range(0, len(stragglers.tasks), step), stragglers.tasks[::step])

    return _picture(draw, frame, heights=(0.3 * min(len(stragglers.tasks), 16),))


def _picture(
    draw: Callable[[Sequence[Axes]], None], frame: TimeFrame, heights: Sequence[float]
) -> str:
    """Draws axes below each other with a common axis of time."""
    matplotlib: Any = load("matplotlib", **_NEEDS)
    figure_module: Any = load("matplotlib.figure", **_NEEDS)
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "stratagem",
        "text.parse_math": False,  # names of metrics may hold a "$"
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": 9,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _FAINT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
    }
    with matplotlib.rc_context(style):
        height_in = sum(heights) + _TOP_IN + _BOTTOM_IN + _GAP_IN * (len(heights) - 1)
        figure = figure_module.Figure(figsize=(_WIDTH_IN, height_in))
        axes = figure.subplots(
            len(heights), sharex=True, squeeze=False, height_ratios=heights
        ).flatten()
        figure.subplots_adjust(
            left=_LEFT_IN / _WIDTH_IN,
            right=1 - 0.15 / _WIDTH_IN,
            bottom=_BOTTOM_IN / height_in,
            top=1 - _TOP_IN / height_in,
            hspace=_GAP_IN * len(heights) / sum(heights),
        )
        draw(axes)
        for one in axes:
            one.set_xlim(0, frame.end)
            one.spines[["top", "right"]].set_visible(False)
            for failure in frame.failures:
                one.axvline(failure, color=_LOST, linewidth=1, linestyle=(0, (3, 2)))
            one.grid(axis="y", color=_FAINT, linewidth=0.6)
            one.set_axisbelow(True)
        axes[-1].set_xlabel(f"{frame.unit} from the first start")
        file = io.BytesIO()
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


# The cell about workers for which the others wait.

_HEADERS = (
    "worker",
    "input",
    "own work",
    "waits for others",
    "transfer",
    "slow in",
)
_MAX_ROWS = 32


def straggler_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows who holds up the others, and why."""
    stragglers, workers = one.series.stragglers, one.series.workers
    if stragglers is not None:
        drawn = straggler_chart(stragglers, frame)
        longest = duration_text(stragglers.longest_s)
        return Cell(
            charts=(drawn,),
            headers=_HEADERS,
            rows=tuple(map(_row, _shown(workers))),
            note=f"{_findings(workers)} Darkest: {longest} per step.",
        )
    if len({process.task for process in one.run.processes if process.trains}) < 2:
        return Cell(empty="A run of one worker has no stragglers.")
    return Cell(
        empty=f"{one.series.num_unmeasured} lines of steps have no measured waits. `fit` measures "
        "them; in your own loop, pass waits to the step method of sg.goodput.current_events()."
    )


def _shown(workers: Sequence[WorkerSummary]) -> list[WorkerSummary]:
    """Returns the workers with a row: all, or the slow ones and some of the others."""
    shown = sorted(workers, key=lambda worker: worker.slow is None)[:_MAX_ROWS]
    return [worker for worker in workers if worker in shown]


def _row(worker: WorkerSummary) -> tuple[str, ...]:
    return (
        worker.task,
        _per_step(worker.input_s),
        _per_step(worker.work_s),
        _per_step(worker.peers_s),
        _per_step(worker.transfer_s),
        "-" if worker.slow is None else worker.slow.cause.value,
    )


def _per_step(time_s: float | None) -> str:
    return "-" if time_s is None else duration_text(time_s)


def _findings(workers: Sequence[WorkerSummary]) -> str:
    """Returns a sentence about each slow worker."""
    found = [
        f"{one.slow.text}, in {one.num_late_steps:,} of {one.num_steps:,} steps."
        for one in workers
        if one.slow is not None
    ]
    return " ".join(found) or "No worker is slow."


# Cells with charts: time, values, speed, members and memory.

_MAX_CHART_ROWS = 20


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
        legend=tuple((CAUSE_COLORS[cause], names[cause]) for cause in shown),
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
    drawn = line_chart({"speed": series.speed}, frame, "steps/s", is_stepped=True)
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
    more = len(rows) - _MAX_CHART_ROWS
    return Cell(
        charts=(members_chart(changes, frame),),
        legend=((_LOST, "lost"), (_JOINED, "joined")),
        headers=("at", "lost", "joined", "members", "change of the group", "training stood still"),
        rows=tuple(rows[:_MAX_CHART_ROWS]),
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


# Cells with tables: failures, checkpoints, the plan and warnings.

_MAX_TABLE_ROWS = 20


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
        rows=tuple(ordered[:_MAX_TABLE_ROWS]),
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
        rows=tuple(rows[:_MAX_TABLE_ROWS]),
        note=f"{len(rows)} checkpoints, {stalls} of stalls. {_left_out(rows)}",
    )


def plan_cell(one: ReportedRun, _frame: TimeFrame) -> Cell:
    """Shows a plan beside the measurement."""
    plan = one.plan
    if plan is None:
        return Cell(
            empty=one.plan_problem
            or f"The run folder has no {PLAN_FILE}. Write it with: stratagem plan --target TARGET "
            f"--output {one.name}/{PLAN_FILE} SCRIPT"
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
        rows=tuple(rows[:_MAX_TABLE_ROWS]),
        note=_left_out(rows),
    )


def _left_out(rows: Sized) -> str:
    more = len(rows) - _MAX_TABLE_ROWS
    return f"{more} more are left out." if more > 0 else ""


# Sections of a report: a title, the way to read it, and its content.

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
        "Workers without red wait for the red one. Times are medians of a step.",
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


def sections_of(one: ReportedRun) -> list[tuple[str, str, Cell]]:
    """Returns the title of each section, the way to read it, and its content."""
    failures_s = [failure.told_s for failure in one.account.failures]
    frame = TimeFrame(one.account.whole_s, failures_s)
    return [(title, reading, cell(one, frame)) for title, reading, cell in _SECTIONS]


_TEMPLATE = "report_page.html.j2"
_NEEDS = {"needed_by": "The report of a run", "install": "'stratagem[observe]'"}


def write_report(run_dir: Path, path: Path) -> None:
    """Writes the report of a run.

    Raises ImportError without matplotlib or Jinja, NotFoundError for a folder without events, and
    OSError if the file cannot be written.
    """
    text = render(load_run(run_dir))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(one: ReportedRun) -> str:
    """Returns the page."""
    jinja: Any = load("jinja2", **_NEEDS)
    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("stratagem.observe") / _TEMPLATE
    begin = datetime.datetime.fromtimestamp(one.account.begin_s, tz=datetime.UTC)
    state = "" if one.account.is_over else "; still running or killed"
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        name=one.name,
        began=f"started {begin:%Y-%m-%d %H:%M:%S} UTC{state}",
        tiles=tiles_of(one),
        sections=sections_of(one),
    )

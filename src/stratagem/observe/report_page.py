"""HTML report of a run: one file that needs no network, and its picture of the run over time."""

from __future__ import annotations

import base64
import datetime
import importlib.resources
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.environment import load
from stratagem.observe.events import (
    MemoryEvent,
    ProcessEvents,
    ProgressEvent,
    RestartEvent,
    RunEvents,
    SaveEndedEvent,
    read_run,
)
from stratagem.observe.goodput import CAUSES, Account, account_for
from stratagem.observe.history import history_of
from stratagem.observe.stragglers import WorkerSummary, summaries_of
from stratagem.observe.terminal import (
    CAUSE_COLORS,
    cause_name,
    changes_line,
    counts_line,
    duration_or_dash,
    duration_text,
    goodput_lines,
    time_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lines over time, in seconds after the start of the run.

_NUM_COLUMNS = 80


Line = list[tuple[float, float]]
"""Times and values of a line; a value that is not a number is a gap."""


def values_of(run: RunEvents, begin_s: float) -> dict[str, Line]:
    """Returns loss and metrics by name, of the first process that has each: all have the same."""
    found = [
        (process.at_s(event) - begin_s, process.task, event)
        for process in run.processes
        for event in process.events
        if isinstance(event, ProgressEvent)
    ]
    owners: dict[str, str] = {}
    points: dict[str, Line] = {}
    for at_s, task, event in sorted(found, key=lambda one: one[:2]):
        for name, value in event.values.items():
            if owners.setdefault(name, task) == task:
                points.setdefault(name, []).append((at_s, math.nan if value is None else value))
    return points


def speed_of(run: RunEvents, account: Account) -> Line:
    """Returns the steps per second of the fastest worker in each column of time.

    First steps after a start, which contain the compilation, are left out.
    """
    width_s = account.whole_s / _NUM_COLUMNS
    by_task: dict[str, list[float]] = {}
    for process in run.processes:
        counts = by_task.setdefault(process.task, [0.0] * _NUM_COLUMNS)
        for one in history_of(process).intervals if process.trains else ():
            begin_s, end_s = one.begin_s - account.begin_s, one.end_s - account.begin_s
            if not one.is_first:
                for column, part_s in _columns(begin_s, end_s, width_s, _NUM_COLUMNS):
                    counts[column] += one.num_steps * part_s / (end_s - begin_s)
    fastest = [max(column) for column in zip(*by_task.values(), strict=True)]
    if not any(fastest):
        return []
    columns = enumerate((*fastest, fastest[-1]))
    return [(column * width_s, count / width_s) for column, count in columns]


def memory_of(processes: Iterable[ProcessEvents], field: str, begin_s: float) -> dict[str, Line]:
    """Returns a line of GiB per task; a gap separates its processes."""
    points: dict[str, Line] = {}
    for process in processes:
        found = [
            (process.at_s(event) - begin_s, value / 1024**3)
            for event in process.events
            if isinstance(event, MemoryEvent) and (value := getattr(event, field)) is not None
        ]
        if found:
            line = points.setdefault(process.task, [])
            line += [(found[0][0], math.nan), *found] if line else found
    return points


def shares_over_time(account: Account, num_columns: int) -> dict[str, list[float]]:
    """Returns each cause's fraction of every column of time.

    Columns of equal width prevent short losses from being drawn too wide.
    """
    shares = {cause: [0.0] * num_columns for cause in CAUSES}
    width_s = account.whole_s / num_columns
    for span in account.spans:
        for column, part_s in _columns(span.begin_s, span.end_s, width_s, num_columns):
            shares[span.cause][column] += part_s / width_s
    return shares


def _columns(
    begin_s: float, end_s: float, width_s: float, num_columns: int
) -> Iterator[tuple[int, float]]:
    """Yields each column that an interval overlaps, with the seconds of it there."""
    column = max(0, int(begin_s / width_s)) if width_s > 0 else num_columns
    while column < num_columns and column * width_s < end_s:
        part_s = min(end_s, (column + 1) * width_s) - max(begin_s, column * width_s)
        if part_s > 0:
            yield column, part_s
        column += 1


# The picture: panels below each other with a common axis of time.

_LINE_COLORS = ("#2a78b9", "#e8862f", "#3a9a5c", "#8a5bb9", "#c8378d", "#4bb4c4", "#8c8c2b")
_TEXT, _FAINT = "#1d2228", "#dfe3e8"
_STYLE = {
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
_LABEL: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center"}
_WIDTH_IN = 9.0
# Room for the legend of causes above the panels, and for the axis of time below.
_EDGES_IN = 1.2
_GAP_IN = 0.25
_NUM_TIME_COLUMNS = 400
_MAX_LINES = 12
_NEEDS = {"needed_by": "The report of a run", "install": "'stratagem[observe]'"}


class Series(NamedTuple):
    """Lines of one panel; the hint says how to record them."""

    label: str
    lines: Mapping[str, Line]
    hint: str = ""
    is_stepped: bool = False

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(self.lines.values())


def series_of(run: RunEvents, account: Account) -> list[Series]:
    """Returns what the picture shows below the causes, also what was not recorded."""
    values = values_of(run, account.begin_s)
    loss = {name: line for name, line in values.items() if "loss" in name}
    metrics = {name: line for name, line in values.items() if "loss" not in name}
    members = [(change.at_s, float(change.num_members)) for change in account.member_changes]
    members += [(account.whole_s, members[-1][1])] if members else []
    hint = (
        "No values were recorded. `fit` records them at the end of each epoch; in your own loop, "
        'call sg.goodput.progress({"loss": loss}).'
    )
    of_host, of_device = (
        memory_of(run.processes, field, account.begin_s) for field in ("host_bytes", "device_bytes")
    )
    return [
        Series("loss", loss, "" if values else hint),
        Series("metrics" if len(metrics) > 1 else min(metrics, default=""), metrics),
        Series(
            "steps/s",
            {"speed": speed_of(run, account)},
            "No step ended after the first. `fit` records steps; in your own loop, call "
            "sg.goodput.step(step).",
            is_stepped=True,
        ),
        Series("members", {"members": members}, is_stepped=True),
        Series(
            "host\nGiB",
            of_host,
            "No memory was recorded. Processes sample it by themselves if STRATAGEM_RUN_DIR is set "
            "when they start.",
        ),
        Series(
            "device\nGiB",
            of_device,
            "Devices reported no memory, as CPUs do not." if of_host else "",
        ),
    ]


def draw(run: RunEvents, path: str | Path) -> None:
    """Writes the picture to a file; the extension selects the format.

    Raises ImportError without matplotlib, ValueError for an unsupported format, and OSError if the
    file cannot be written.
    """
    path = Path(path)
    figure = figure_of(run, account_for(run))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def figure_of(run: RunEvents, account: Account) -> Figure:
    """Returns a matplotlib figure of the run over time; what was not recorded has no panel."""
    matplotlib: Any = load("matplotlib", **_NEEDS)
    figure_module: Any = load("matplotlib.figure", **_NEEDS)
    unit_s, unit = time_unit(account.whole_s)
    series = [one for one in series_of(run, account) if not one.is_empty]
    heights = [0.45, 0.9, *[1.1] * len(series)]
    size = (_WIDTH_IN, sum(heights) + _GAP_IN * len(heights) + _EDGES_IN)
    failures = [failure.told_s / unit_s for failure in account.failures]
    with matplotlib.rc_context(_STYLE):
        figure = figure_module.Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(heights), sharex=True, height_ratios=heights)
        _draw_time(axes[0], axes[1], account, unit_s)
        for one, drawn in zip(axes[2:], series, strict=True):
            _draw_lines(one, drawn, unit_s)
        for one in axes:
            one.set_xlim(0, max(account.whole_s / unit_s, 1e-9))
            one.spines[["top", "right"]].set_visible(False)
            for failure in failures:
                color = CAUSE_COLORS["detecting"]
                one.axvline(failure, color=color, linewidth=1, linestyle=(0, (3, 2)))
            one.grid(axis="y", color=_FAINT, linewidth=0.6)
            one.set_axisbelow(True)
        axes[-1].set_xlabel(f"{unit} from the first start")
        named = axes[0].get_legend_handles_labels()
        figure.legend(*named, loc="outside upper left", ncols=5, frameon=False)
    return figure


def time_unit(whole_s: float) -> tuple[float, str]:
    """Returns the unit of an axis of time: its seconds, and its name."""
    if whole_s < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if whole_s < 4 * 3600 else (3600.0, "hours")


def _draw_time(causes: Axes, goodput: Axes, account: Account, unit_s: float) -> None:
    """Draws the causes of each moment, and goodput from the first start to it."""
    shares = shares_over_time(account, _NUM_TIME_COLUMNS)
    # A run of a single moment has no cause.
    shown = {cause: row for cause, row in shares.items() if any(row)} or shares
    width = account.whole_s / unit_s / _NUM_TIME_COLUMNS
    edges = [column * width for column in range(_NUM_TIME_COLUMNS + 1)]
    causes.stackplot(
        edges,
        [[*row, row[-1]] for row in shown.values()],  # a value holds until the next edge
        labels=[cause_name(cause) for cause in shown],
        colors=[CAUSE_COLORS[cause] for cause in shown],
        step="post",
        linewidth=0,
    )
    causes.set_ylim(0, 1)
    causes.set_yticks([])
    causes.set_ylabel("time spent", **_LABEL)
    useful, counted = 0.0, 0.0
    so_far: list[float] = []
    for column in range(_NUM_TIME_COLUMNS):
        useful += shares["useful"][column]
        counted += sum(row[column] for row in shares.values()) - shares["starting"][column]
        so_far.append(useful / counted if counted > 1e-9 else math.nan)
    goodput.plot(edges[1:], so_far, color=CAUSE_COLORS["useful"], linewidth=1.8)
    goodput.set_ylim(0, 1.03)
    goodput.set_ylabel("goodput after\nstart-up", **_LABEL)


def _draw_lines(axes: Axes, series: Series, unit_s: float) -> None:
    """Draws lines from 0 on, with a legend if there are several."""
    for number, (name, line) in enumerate(list(series.lines.items())[:_MAX_LINES]):
        times = [time_s / unit_s for time_s, _ in line]
        color = _LINE_COLORS[number % len(_LINE_COLORS)]
        marker = "" if series.is_stepped or len(times) >= 40 else "o"
        style = "steps-post" if series.is_stepped else "default"
        (drawn,) = axes.plot(
            times, [value for _, value in line], marker, markersize=2.5, label=name
        )
        drawn.set(color=color, linestyle="-", linewidth=1.6, drawstyle=style)
    if len(series.lines) > 1:
        # On the left is the exponent of small values.
        axes.legend(frameon=False, fontsize=8, ncols=6, loc="lower right", bbox_to_anchor=(1, 1))
    values = [one for line in series.lines.values() for _, one in line if math.isfinite(one)]
    lowest, highest = min([0.0, *values]), max([0.0, *values])
    axes.set_ylim(1.08 * lowest, 1.08 * highest if highest > lowest else 1.0)
    axes.set_ylabel(series.label, **_LABEL)


# The page: the picture, and tables below it.

_TEMPLATE = "report_page.html.j2"
_MAX_OF_A_KIND = 20
_MAX_WORKERS = 32


class Section(NamedTuple):
    """A table with a title and the way to read it; the note says why there are no rows."""

    title: str
    reading: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def write_report(run_dir: Path, path: Path) -> None:
    """Writes the report of a run.

    Raises ImportError without matplotlib or Jinja, NotFoundError for a folder without events, and
    OSError if the file cannot be written.
    """
    text = render(str(run_dir), read_run(run_dir))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(name: str, run: RunEvents) -> str:
    """Returns the page."""
    jinja: Any = load("jinja2", **_NEEDS)
    matplotlib: Any = load("matplotlib", **_NEEDS)
    account = account_for(run)
    picture = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure_of(run, account).savefig(picture, format="svg", metadata={"Date": None})
    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("stratagem.observe") / _TEMPLATE
    begin = datetime.datetime.fromtimestamp(account.begin_s, tz=datetime.UTC)
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        name=name,
        began=f"started {begin:%Y-%m-%d %H:%M:%S} UTC",
        lines=[*goodput_lines(account), counts_line(account), changes_line(account)],
        hints=[one.hint for one in series_of(run, account) if one.is_empty and one.hint],
        picture=base64.b64encode(picture.getvalue()).decode(),
        problems=account.problems,
        sections=sections_of(run, account),
    )


def sections_of(run: RunEvents, account: Account) -> list[Section]:
    """Returns the tables of a run."""
    return [_time_section(account), _worker_section(run, account), _event_section(run, account)]


def _time_section(account: Account) -> Section:
    rows = [
        (cause_name(cause), *numbers, meaning.removeprefix("start-up: "))
        for cause, *numbers, meaning in time_rows(account)
    ]
    reading = "Each moment has one cause, so that they sum to the whole time."
    headers = ("cause", "time", "share", "meaning")
    return Section("Where the time went", reading, headers, rows, "")


def _worker_section(run: RunEvents, account: Account) -> Section:
    workers = summaries_of(run.processes, account.whole_s)
    empty = (
        "A run of one worker has no slow one, and without measured waits none is found. `fit` "
        "measures them; in your own loop, pass waits to the step method of "
        "sg.goodput.current_events()."
    )
    # All workers have a row, or the slow ones and some of the others.
    shown = sorted(workers, key=lambda worker: worker.slow is None)[:_MAX_WORKERS]
    found = [
        f"{one.slow.text}, in {one.num_late_steps:,} of {one.times.num_steps:,} steps."
        for one in workers
        if one.slow is not None
    ]
    return Section(
        "Slow workers",
        "In lockstep the others wait for the worker whose own work takes longest. Times are "
        "medians of a step.",
        ("worker", "input", "own work", "waits for others", "transfer", "slow in"),
        [_worker_row(one) for one in workers if one in shown],
        (" ".join(found) or "No worker is slow.") if workers else empty,
    )


def _worker_row(one: WorkerSummary) -> tuple[str, ...]:
    times = one.times
    times_s = (times.input_s, times.busy_s - (times.input_s or 0.0), times.peers_s)
    return (
        one.task,
        *map(duration_or_dash, (*times_s, times.transfer_s)),
        "-" if one.slow is None else one.slow.cause.value,
    )


def _event_section(run: RunEvents, account: Account) -> Section:
    events = sorted([*_failures(run, account), *_changes(account), *_saves(run, account)])
    counts: Counter[str] = Counter()
    rows: list[tuple[str, str, str]] = []
    for at_s, kind, text in events:
        counts[kind] += 1
        if counts[kind] <= _MAX_OF_A_KIND:
            rows.append((duration_text(at_s), kind, text))
    left_out = [
        f"{count - _MAX_OF_A_KIND} more of the kind {kind} are left out."
        for kind, count in counts.items()
        if count > _MAX_OF_A_KIND
    ]
    empty = (
        "No failure, no restart and no checkpoint was recorded. sg.BackupAndRestore and "
        "sg.train.CheckpointManager record theirs."
    )
    reading = "Times are from the first start."
    note = " ".join(left_out) if rows else empty
    return Section("What happened", reading, ("at", "event", "meaning"), rows, note)


def _failures(run: RunEvents, account: Account) -> Iterator[tuple[float, str, str]]:
    for one in account.failures:
        detected = "" if one.detect_s is None else f", detected in {duration_text(one.detect_s)}"
        again = ", no step since"
        if one.resume_s is not None:
            again = f", the next step {duration_text(one.resume_s)} later"
        where = "" if one.step is None else f" in shared program {one.step:,}"
        who = "" if one.reported_by is None else f", reported by {one.reported_by}"
        yield one.told_s, "failure", f"{one.what}{where}{who}{detected}{again}"
    for process in run.processes:
        for event in process.events:
            if isinstance(event, RestartEvent):
                at_s = process.at_s(event) - account.begin_s
                yield at_s, "restart", f"{event.attempt}: {event.cause}"


def _changes(account: Account) -> Iterator[tuple[float, str, str]]:
    for change in account.member_changes:
        if change.cause is not None:
            tasks = ", ".join([*change.lost, *change.joined])
            text = f"{tasks}; {change.num_members} of {change.num_expected} train"
            if change.pause_s is not None:
                text += f"; training stood still for {duration_text(change.pause_s)}"
            yield change.at_s, change.cause, text


def _saves(run: RunEvents, account: Account) -> Iterator[tuple[float, str, str]]:
    """Yields checkpoints; those of one step and one start of the group are one."""
    groups: dict[tuple[int, int], list[tuple[float, SaveEndedEvent]]] = {}
    for process in run.processes:
        for event in process.events:
            if isinstance(event, SaveEndedEvent):
                group = groups.setdefault((process.start.attempt, event.step), [])
                group.append((process.at_s(event) - account.begin_s, event))
    for (_, step), group in groups.items():
        events = [event for _, event in group]
        failed = next((event.failed for event in events if event.failed is not None), None)
        took = duration_text(max(event.duration_s for event in events))
        stall = duration_text(max(event.stall_s for event in events))
        text = f"step {step:,}, written in {took}, training waited {stall}"
        text = text if failed is None else f"step {step:,}, failed after {took}: {failed}"
        yield max(at_s for at_s, _ in group), "checkpoint", text

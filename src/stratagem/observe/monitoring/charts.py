"""Charts of a report as inline SVG that follows the light or dark colors of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.environment import load
from stratagem.observe.goodput.account import Account
from stratagem.observe.goodput.report import CAUSE_COLORS, shares_over_time
from stratagem.observe.goodput.time_spans import CAUSES, MemberChange
from stratagem.observe.monitoring.run_series import NUM_COLUMNS, Line, StragglerMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cause_role(cause: str) -> str:
    """Returns the role of the color of a cause."""
    return f"cause-{cause.replace(' ', '-')}"


# Colors by role. Each is unique, and becomes a variable of the page's style sheet.
_LINE_COLORS = ("#2a78b9", "#e8862f", "#3a9a5c", "#8a5bb9", "#c8378d", "#4bb4c4", "#8c8c2b")
COLORS = {
    **{cause_role(cause): color for cause, color in CAUSE_COLORS.items()},
    **{f"line-{number}": color for number, color in enumerate(_LINE_COLORS)},
    "text": "#010203",
    "faint": "#d9d9da",
    "failure": "#c8372e",
}
_WIDTH_IN = 7.2
# The same for all charts, so that their times are below each other.
_LEFT_IN = 1.25
_TOP_IN, _BOTTOM_IN, _GAP_IN = 0.25, 0.45, 0.15
_NUM_TIME_COLUMNS = 400
_MAX_LINES = 12
_MAX_LABELS = 6
_DELAY_RGB = (0.85, 0.25, 0.15)


class TimeFrame:
    """Axes that all charts of a report share: the end of time, failures to mark, the top speed."""

    def __init__(self, whole_s: float, failures_s: Sequence[float], top_speed: float = 1.0) -> None:
        self.top_speed = top_speed
        self.unit_s, self.unit = _time_unit(whole_s)
        self.end = max(whole_s / self.unit_s, 1e-9)
        self.failures = [time_s / self.unit_s for time_s in failures_s]


def time_chart(account: Account, frame: TimeFrame) -> str:
    """Draws where the time went, and below it goodput so far after start-up."""

    def draw(axes: Sequence[Axes]) -> None:
        causes, goodput = axes
        shares = shares_over_time(account, _NUM_TIME_COLUMNS)
        width = account.whole_s / frame.unit_s / _NUM_TIME_COLUMNS
        edges = [index * width for index in range(_NUM_TIME_COLUMNS + 1)]
        rows = [[*row, row[-1]] for row in shares.values()]
        colors = [COLORS[cause_role(cause)] for cause in CAUSES]
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
        goodput.plot(edges[1:], so_far, color=COLORS["cause-useful"], linewidth=1.8)
        goodput.set_ylim(0, 1.03)
        goodput.set_ylabel("goodput after\nstart-up", rotation=0, ha="right", va="center")

    return _svg(draw, frame, heights=(0.45, 1.0))


def line_chart(
    lines: Mapping[str, Line],
    frame: TimeFrame,
    label: str,
    *,
    top: float | None = None,
    is_stepped: bool = False,
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
        lowest, highest = min([0.0, *drawn]), max([0.0, *drawn]) if top is None else top
        chart.set_ylim(1.08 * lowest, 1.08 * highest if highest > lowest else 1.0)
        chart.set_ylabel(label, rotation=0, ha="right", va="center")

    return _svg(draw, frame, heights=(1.3,))


def members_chart(changes: Sequence[MemberChange], frame: TimeFrame, whole_s: float) -> str:
    """Draws the number of members over time, with a mark for each loss and each join."""

    def draw(axes: Sequence[Axes]) -> None:
        (chart,) = axes
        times = [change.at_s / frame.unit_s for change in changes]
        numbers = [change.num_members for change in changes]
        style: dict[str, Any] = {"drawstyle": "steps-post"}
        chart.plot(
            [*times, whole_s / frame.unit_s],
            [*numbers, *numbers[-1:]],
            color=_LINE_COLORS[0],
            linewidth=1.6,
            **style,
        )
        most = max(change.num_expected for change in changes)
        for marker, role, height, named in (
            ("v", "failure", most + 0.35, [change.lost for change in changes]),
            ("^", "cause-useful", most + 0.75, [change.joined for change in changes]),
        ):
            marked = [time for time, tasks in zip(times, named, strict=True) if tasks]
            if marked:
                heights = [height] * len(marked)
                chart.plot(marked, heights, marker, color=COLORS[role], markersize=4, linewidth=0)
        chart.set_ylim(0, most + 1.1)
        chart.set_yticks(range(0, most + 1, 1 + most // 8))
        chart.set_ylabel("members", rotation=0, ha="right", va="center")

    return _svg(draw, frame, heights=(0.9,))


def straggler_chart(stragglers: StragglerMap, frame: TimeFrame, whole_s: float) -> str:
    """Draws a row per worker; the redder, the longer it holds up each step."""
    longest_s = stragglers.longest_s or 1.0

    def draw(axes: Sequence[Axes]) -> None:
        (chart,) = axes
        pixels = [
            [(*_DELAY_RGB, 0.0 if math.isnan(one) else one / longest_s) for one in row]
            for row in stragglers.delays_s
        ]
        for number, row in enumerate(pixels):
            _draw_cells(chart, number, row, whole_s / frame.unit_s / NUM_COLUMNS)
        chart.set_ylim(len(pixels) - 0.5, -0.5)
        step = 1 + len(pixels) // 16
        chart.set_yticks(range(0, len(pixels), step), stragglers.tasks[::step])

    return _svg(draw, frame, heights=(0.3 * min(len(stragglers.tasks), 16),))


def _draw_cells(
    chart: Axes, number: int, row: Sequence[tuple[float, float, float, float]], width: float
) -> None:
    """Draws equal neighbors as one rectangle."""
    begin = 0
    levels = [round(10 * color[3]) for color in row]
    for column in range(1, len(row) + 1):
        if column == len(row) or levels[column] != levels[begin]:
            if levels[begin]:
                chart.broken_barh(
                    [(begin * width, (column - begin) * width)],
                    (number - 0.42, 0.84),
                    facecolor=_DELAY_RGB,
                    alpha=levels[begin] / 10,
                    linewidth=0,
                )
            begin = column


def _svg(draw: Callable[[Sequence[Axes]], None], frame: TimeFrame, heights: Sequence[float]) -> str:
    """Draws axes below each other with a common axis of time, and returns the SVG element."""
    needs = {"needed_by": "The report of a run", "install": "'stratagem[observe]'"}
    matplotlib: Any = load("matplotlib", **needs)
    figure_module: Any = load("matplotlib.figure", **needs)
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "stratagem",
        "text.parse_math": False,
        "font.size": 9,
        "text.color": COLORS["text"],
        "axes.labelcolor": COLORS["text"],
        "axes.edgecolor": COLORS["faint"],
        "xtick.color": COLORS["text"],
        "ytick.color": COLORS["text"],
    }
    with matplotlib.rc_context(style):
        height_in = sum(heights) + _TOP_IN + _BOTTOM_IN + _GAP_IN * (len(heights) - 1)
        figure = figure_module.Figure(figsize=(_WIDTH_IN, height_in))
        axes = [
            figure.add_axes(
                (
                    _LEFT_IN / _WIDTH_IN,
                    1 - (_TOP_IN + sum(heights[: number + 1]) + _GAP_IN * number) / height_in,
                    1 - (_LEFT_IN + 0.15) / _WIDTH_IN,
                    height / height_in,
                )
            )
            for number, height in enumerate(heights)
        ]
        draw(axes)
        for one in axes:
            one.set_xlim(0, frame.end)
            one.spines[["top", "right"]].set_visible(False)
            for failure in frame.failures:
                one.axvline(failure, color=COLORS["failure"], linewidth=1, linestyle=(0, (3, 2)))
            one.grid(axis="y", color=COLORS["faint"], linewidth=0.6)
            one.set_axisbelow(True)
            one.tick_params(labelbottom=one is axes[-1])
        axes[-1].set_xlabel(f"{frame.unit} from the first start")
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue())


def _inline(text: str) -> str:
    """Returns the element without prolog, metadata, identifiers in use twice, and fixed colors."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for role, color in COLORS.items():
        text = text.replace(color, f"var(--{role})")
    return re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)


def _time_unit(whole_s: float) -> tuple[float, str]:
    if whole_s < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if whole_s < 4 * 3600 else (3600.0, "hours")

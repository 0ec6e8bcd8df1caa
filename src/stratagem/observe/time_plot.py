"""Plot of a run's time line and of the time lost to each cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.environment import load
from stratagem.observe.goodput import CAUSES, Account
from stratagem.observe.terminal import counts_line, duration_text, goodput_lines, shown_causes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Plot of a run's time line and of the time lost to each cause, with matplotlib.

CAUSE_COLORS = {
    "useful": "#3a9a5b",
    "repeated": "#8a5bb8",
    "members lost": "#7a4a21",
    "members joined": "#3fb0a8",
    "detecting": "#c8372d",
    "restarting": "#e8862e",
    "saving": "#2a78b8",
    "starting": "#e3c53b",
    "waiting": "#b5b5b5",
}
_NUM_COLUMNS = 1000
_WIDTH_IN = 10
_HEIGHT_IN = 4.8
# More labels would overlap.
_MAX_NUMBERED = 12


def draw(account: Account, path: str | Path) -> None:
    """Writes the plot to a file; the extension selects the format.

    Raises ImportError without matplotlib, ValueError for an unsupported format, and OSError if the
    file cannot be written.
    """
    path = Path(path)
    figure = figure_of(account)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def figure_of(account: Account) -> Figure:
    """Returns a matplotlib figure: the time line on top, the lost time by cause below."""
    figure_module = load(
        "matplotlib.figure", needed_by="The plot of a run", install="'stratagem[observe]'"
    )
    figure = figure_module.Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    over_time, totals = figure.subplots(2, 1, height_ratios=(1, 2))
    _draw_time_line(over_time, account)
    _draw_losses(totals, account)
    figure.suptitle("\n".join([goodput_lines(account)[0], counts_line(account)]), fontsize=12)
    return figure


def shares_over_time(account: Account, num_columns: int) -> dict[str, list[float]]:
    """Returns each cause's fraction of every column of time.

    Columns of equal width prevent short losses from being drawn too wide.
    """
    shares = {cause: [0.0] * num_columns for cause in CAUSES}
    if account.whole_s <= 0:
        return shares
    width_s = account.whole_s / num_columns
    for span in account.spans:
        column = min(int(span.begin_s / width_s), num_columns - 1)
        begin_s = span.begin_s
        while column < num_columns and begin_s < span.end_s:
            last = column == num_columns - 1
            end_s = span.end_s if last else min(span.end_s, (column + 1) * width_s)
            shares[span.cause][column] += max(0.0, end_s - begin_s) / width_s
            begin_s, column = max(begin_s, end_s), column + 1
    return shares


def _draw_time_line(axes: Axes, account: Account) -> None:
    unit_s, unit = time_unit(account.whole_s)
    width = account.whole_s / unit_s / _NUM_COLUMNS
    # Repeat the last column at the last edge: each value holds until the next edge.
    rows = [[*row, row[-1]] for row in shares_over_time(account, _NUM_COLUMNS).values()]
    edges = [index * width for index in range(_NUM_COLUMNS + 1)]
    colors = [CAUSE_COLORS[cause] for cause in CAUSES]
    axes.stackplot(edges, rows, step="post", colors=colors, linewidth=0)
    failure_times = [failure.told_s / unit_s for failure in account.failures]
    # An empty series outside the axes would break the layout.
    if failure_times:
        axes.plot(
            failure_times,
            [1.1] * len(failure_times),
            "v",
            color="black",
            markersize=6,
            clip_on=False,
        )
    if len(failure_times) <= _MAX_NUMBERED:
        _label_failures(axes, failure_times, account.whole_s / unit_s)
    axes.set_xlim(0, max(account.whole_s / unit_s, 1e-9))
    axes.set_ylim(0, 1.35)
    axes.set_yticks([])
    marked = "; triangle: failure" if failure_times else ""
    axes.set_xlabel(f"{unit} from the first start; green: useful, yellow: start-up{marked}")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label_failures(axes: Axes, failure_times: Sequence[float], whole: float) -> None:
    """Numbers the failures; nearby ones share a label."""
    groups: list[list[int]] = []
    for number, index in enumerate(failure_times):
        if groups and index - failure_times[groups[-1][-1]] < 0.035 * whole:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        first, last = group[0], group[-1]
        middle = (failure_times[first] + failure_times[last]) / 2
        text = f"{first + 1}" if first == last else f"{first + 1}-{last + 1}"
        axes.text(middle, 1.2, text, ha="center", va="bottom", fontsize=9)


def _draw_losses(axes: Axes, account: Account) -> None:
    causes = [cause for cause in shown_causes(account) if cause != "useful"]
    shares = [100 * account.time_s[cause] / (account.whole_s or 1.0) for cause in causes]
    # Useful time is omitted: next to it, losses would be too small to see.
    longest = max([0.1, *shares])
    axes.barh(
        range(len(causes)), shares, height=0.7, color=[CAUSE_COLORS[cause] for cause in causes]
    )
    for index, (cause, share) in enumerate(zip(causes, shares, strict=True)):
        text = f"{share:.1f} %, {duration_text(account.time_s[cause])}"
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(share + 0.01 * longest, index, text, va="center", fontsize=9, bbox=white)
    axes.set_yticks(range(len(causes)), causes)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * longest)
    axes.set_xlabel("lost: percent of wall time")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def time_unit(whole_s: float) -> tuple[float, str]:
    """Returns the unit of an axis of time: its seconds, and its name."""
    if whole_s < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if whole_s < 4 * 3600 else (3600.0, "hours")

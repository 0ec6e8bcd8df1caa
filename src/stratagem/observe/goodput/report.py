"""Tables of a run's goodput, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.environment import load
from stratagem.observe.goodput.account import Account
from stratagem.observe.goodput.time_spans import CAUSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAUSE_MEANINGS = {
    "useful": "steps that count",
    "repeated": "steps lost and run again",
    "members lost": "training stood still because members were lost",
    "members joined": "training stood still because members joined",
    "detecting": "from the last step to the detection of a failure",
    "restarting": "from detection to the next step",
    "saving": "training waited for a checkpoint",
    "starting": "start-up: from a start to the end of the first step",
    "waiting": "waiting for data, evaluation, everything else",
}
_OF_ELASTIC_GROUPS = ("members lost", "members joined")
_MAX_FAILURES = 20


def duration_text(seconds: float) -> str:
    """Formats a duration with a sensible number of digits.

    Example:
        >>> [duration_text(seconds) for seconds in (0, 0.34, 12.34, 307, 11100)]
        ['0 ms', '340 ms', '12.3 s', '5 min 07 s', '3 h 05 min']
    """
    if round(1000 * seconds) < 1000:
        return f"{round(1000 * seconds)} ms"
    if round(10 * seconds) < 600:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min"


def goodput_lines(account: Account) -> tuple[str, str]:
    """Describes goodput after start-up, and with it, one line each.

    Example:
        >>> from tests.unit.observe.goodput.runs import gang_restart
        >>> after, whole = goodput_lines(sg.goodput.account_for(gang_restart()))
        >>> after
        'Goodput after start-up: 0.588 (40.0 s useful of 1 min 08 s)'
        >>> whole
        'Goodput with start-up:  0.513 (40.0 s useful of 1 min 18 s; start-up took 10.0 s)'
    """
    useful, after = duration_text(account.time_s["useful"]), account.goodput_after_startup
    startup = duration_text(account.startup_s)
    if after is None:
        return "Goodput after start-up: none yet", f"Start-up has taken {startup}."
    rest = duration_text(account.whole_s - account.startup_s)
    whole = duration_text(account.whole_s)
    return (
        f"Goodput after start-up: {after:.3f} ({useful} useful of {rest})",
        f"Goodput with start-up:  {account.goodput:.3f} ({useful} useful of {whole}; "
        f"start-up took {startup})",
    )


def counts_line(account: Account) -> str:
    """Describes the numbers of steps, failures and processes."""
    state = "" if account.is_over else "; still running or killed"
    repeated = f", {account.num_repeated} repeated" if account.num_repeated else ""
    return (
        f"{account.num_steps} steps{repeated}, {len(account.failures)} "
        f"{'failure' if len(account.failures) == 1 else 'failures'}, "
        f"{account.num_processes} {'process' if account.num_processes == 1 else 'processes'}{state}"
    )


def changes_line(account: Account) -> str:
    """Describes the changes of an elastic group's members; empty without any.

    Example:
        >>> from tests.unit.observe.goodput.runs import members_come_and_go
        >>> changes_line(sg.goodput.account_for(members_come_and_go()))
        '3 of 3 members; lost 2 times, joined 2 times; training stood still for 3.5 s'
    """
    changes = account.member_changes
    if not changes:
        return ""
    num_lost = sum(len(change.lost) for change in changes)
    num_joined = sum(len(change.joined) for change in changes)
    pause_s = sum(account.time_s[cause] for cause in _OF_ELASTIC_GROUPS)
    text = f"{changes[-1].num_members} of {changes[-1].num_expected} members"
    if num_lost or num_joined:
        text += f"; lost {_times(num_lost)}, joined {_times(num_joined)}"
        text += f"; training stood still for {duration_text(pause_s)}"
    return text


def _times(number: int) -> str:
    return f"{number} time{'' if number == 1 else 's'}"


def shown_causes(account: Account) -> tuple[str, ...]:
    """Returns the causes to show: those of elastic groups only if they took any time."""
    return tuple(
        cause for cause in CAUSES if cause not in _OF_ELASTIC_GROUPS or account.time_s[cause] > 0
    )


def show(account: Account, console: Console | None = None) -> None:
    """Prints goodput, the breakdown by cause, and the failures."""
    console = console or Console()
    for line in (*goodput_lines(account), counts_line(account), changes_line(account)):
        if line:
            console.print(line, highlight=False)
    console.print(_time_table(account))
    if account.failures:
        console.print(_failure_table(account))
    for problem in account.problems:
        console.print(Text(f"Unreadable: {problem}"), style="dim")


def _time_table(account: Account) -> Table:
    table = Table(title="Time", title_justify="left")
    table.add_column("cause")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("meaning")
    for cause in shown_causes(account):
        time_s = account.time_s[cause]
        share = time_s / account.whole_s if account.whole_s > 0 else 0.0
        table.add_row(cause, duration_text(time_s), f"{share:.1%}", CAUSE_MEANINGS[cause])
    return table


def _failure_table(account: Account) -> Table:
    table = Table(title="Failures", title_justify="left")
    for name in ("at", "to detect", "to resume"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("failure")
    for failure in account.failures[:_MAX_FAILURES]:
        row = (
            _duration_or_dash(failure.detect_s),
            _duration_or_dash(failure.resume_s),
            Text(failure.what),
        )
        table.add_row(duration_text(failure.told_s), *row)
    left_out = len(account.failures) - _MAX_FAILURES
    if left_out > 0:
        table.add_row("...", "...", "...", f"and {left_out} more")
    table.add_section()
    values = account.as_dict()
    for measure in ("median", "worst"):
        times = (values["time_to_detect_s"], values["time_to_resume_s"])
        table.add_row(measure, *(_duration_or_dash(time_s and time_s[measure]) for time_s in times))
    return table


def _duration_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)


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

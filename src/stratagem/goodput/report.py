"""Tables of a run's goodput, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.goodput.account import CAUSES, Account

__all__ = ["duration_text", "show"]

_MEANINGS = {
    "useful": "steps that count",
    "repeated": "steps lost and run again",
    "detecting": "from the last step to the detection of a failure",
    "restarting": "from detection to the next step",
    "saving": "training waited for a checkpoint",
    "starting": "from a start to the first step",
    "waiting": "waiting for data, evaluation, everything else",
}
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


def show(account: Account, console: Console | None = None) -> None:
    """Prints the breakdown by cause, and the failures."""
    console = console or Console()
    state = "" if account.is_over else ", still running or killed"
    repeated = f", {account.num_repeated} repeated" if account.num_repeated else ""
    console.print(
        f"Goodput {account.goodput:.3f} of {duration_text(account.whole_s)}{state}: "
        f"{account.num_steps} steps{repeated}, {len(account.failures)} "
        f"{'failure' if len(account.failures) == 1 else 'failures'}, "
        f"{account.num_processes} {'process' if account.num_processes == 1 else 'processes'}",
        highlight=False,
    )
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
    for cause in CAUSES:
        time_s = account.time_s[cause]
        share = time_s / account.whole_s if account.whole_s > 0 else 0.0
        table.add_row(cause, duration_text(time_s), f"{share:.1%}", _MEANINGS[cause])
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

"""Tables of a run's goodput, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.observe.goodput.account import Account
from stratagem.observe.goodput.time_spans import CAUSES

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
        >>> from tests.goodput.runs import gang_restart
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
        >>> from tests.goodput.runs import members_come_and_go
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

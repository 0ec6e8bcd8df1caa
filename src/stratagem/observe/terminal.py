"""Terminal views of a run: the tables of its goodput, and the frame of `stratagem watch`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stratagem.observe.goodput import CAUSE_MEANINGS, CAUSES, Account
from stratagem.observe.run_state import RunSnapshot, TaskView, Watcher
from stratagem.observe.stragglers import Cause

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
        >>> from tests.unit.observe.runs import gang_restart
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
        >>> from tests.unit.observe.runs import members_come_and_go
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


def cause_name(cause: str) -> str:
    """Returns the name of a cause in pictures."""
    return "start-up" if cause == "starting" else cause


def show_account(account: Account, console: Console | None = None) -> None:
    """Prints goodput, the breakdown by cause, and the failures."""
    console = console or Console()
    for line in (*goodput_lines(account), counts_line(account), changes_line(account)):
        if line:
            console.print(line, highlight=False)
    table = table_of("Time", "cause", ">time", ">share", "meaning")
    for row in time_rows(account):
        table.add_row(*row)
    console.print(table)
    if account.failures:
        console.print(_failure_table(account))
    for problem in account.problems:
        console.print(Text(f"Unreadable: {problem}"), style="dim")


def table_of(title: str, *columns: str) -> Table:
    """Returns a table; columns with a ">" before their name have numbers."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        is_number = name.startswith(">")
        justify = "right" if is_number else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=is_number)
    return table


def time_rows(account: Account) -> list[tuple[str, str, str, str]]:
    """Returns the time of each cause, its share, and its meaning; elastic ones if there are any."""
    return [
        (cause, duration_text(time_s), f"{time_s / (account.whole_s or 1.0):.1%}", meaning)
        for cause, meaning in CAUSE_MEANINGS.items()
        if (time_s := account.time_s[cause]) > 0 or cause not in _OF_ELASTIC_GROUPS
    ]


def _failure_table(account: Account) -> Table:
    table = table_of("Failures", ">at", ">to detect", ">to resume", "failure")
    for failure in account.failures[:_MAX_FAILURES]:
        row = (
            duration_or_dash(failure.detect_s),
            duration_or_dash(failure.resume_s),
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
        table.add_row(measure, *(duration_or_dash(time_s and time_s[measure]) for time_s in times))
    return table


def duration_or_dash(seconds: float | None) -> str:
    """Formats a duration; a dash for None."""
    return "-" if seconds is None else duration_text(seconds)


_PHASE_STYLES = {
    "starting": "yellow",
    "restarting": "yellow",
    "running": "green",
    "waiting": "cyan",
    "failed": "bold red",
    "lost": "bold red",
    "finished": "blue",
}
_BAR_WIDTH = 60
_LAUNCHER = "launcher"
_MAX_TASKS = 32


def frame(name: str, state: RunSnapshot, account: Account | None) -> RenderableType:
    """Returns one frame of the view; `account` is None before the first is computed."""
    parts: list[RenderableType] = [_headline(name, state), _progress(state)]
    if account is not None:
        parts.append(_goodput(account))
    # A launcher has nothing to show unless it failed.
    tasks = [one for one in state.tasks if _LAUNCHER not in one.task or one.phase == "failed"]
    parts.append(_tasks(tasks))
    parts += [Text(f"{one}.", "bold red") for one in state.stragglers]
    if account is not None:
        parts += [Text(f"Unreadable: {problem}", style="dim") for problem in account.problems]
    return Group(*parts)


def bytes_text(number: int | None) -> str:
    """Formats a number of bytes; a dash for None.

    Example:
        >>> [bytes_text(number) for number in (None, 900, 393_592_832, 80 * 1024**3)]
        ['-', '0 MiB', '375 MiB', '80.0 GiB']
    """
    if number is None:
        return "-"
    if number < 1024**3:
        return f"{number / 1024**2:.0f} MiB"
    return f"{number / 1024**3:.1f} GiB"


def _headline(name: str, state: RunSnapshot) -> RenderableType:
    text = Text.assemble((name, "bold"), "  ", (_run_phase(state), "bold"))
    text.append(f"  {duration_text(state.age_s)} since the start")
    if state.num_members is not None and state.num_expected is not None:
        is_full = state.num_members >= state.num_expected
        text.append(
            f", {state.num_members} of {state.num_expected} workers",
            style="" if is_full else "yellow",
        )
    if state.num_restarts:
        noun = "restart" if state.num_restarts == 1 else "restarts"
        text.append(f", {state.num_restarts} {noun}", style="yellow")
    if state.num_launches > 1:
        text.append(f"; launch {state.num_launches} in this folder, goodput covers all of them")
    return text


def _run_phase(state: RunSnapshot) -> str:
    phases = [one.phase for one in state.tasks if not one.task.startswith((_LAUNCHER, "ps"))]
    if state.is_over:
        return "failed" if "failed" in phases else "finished"
    order = ("running", "waiting", "restarting", "starting", "lost", "failed")
    return next((phase for phase in order if phase in phases), "no workers yet")


def _progress(state: RunSnapshot) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    step = "-" if state.step is None else f"{state.step:,}"
    if state.total_steps:
        bar = ProgressBar(total=state.total_steps, completed=state.step or 0, width=30)
        share = min(1.0, (state.step or 0) / state.total_steps)
        grid.add_row("step", Text(f"{step} of {state.total_steps:,}", "bold"), bar, f"{share:.0%}")
    else:
        grid.add_row("step", Text(step, "bold"))
    if state.num_epochs:
        grid.add_row("epochs", f"{state.epoch} of {state.num_epochs} completed")
    if state.steps_per_s:
        left = "" if state.left_s is None else f"{duration_text(state.left_s)} left"
        grid.add_row("speed", f"{state.steps_per_s:.4g} steps/s", left)
    elif state.total_steps or state.step:
        grid.add_row("speed", "- (no steps after the first yet)")
    for name in sorted(state.values, key=lambda name: name != "loss"):
        value = state.values[name]
        text = Text("not finite", "bold red") if value is None else Text(f"{value:.5g}", "bold")
        grid.add_row(name, text)
    return Padding(grid, (1, 0, 0, 0))


def _goodput(account: Account) -> RenderableType:
    after, whole = goodput_lines(account)
    bar = Text()
    legend = Text()
    done = 0.0
    for cause in CAUSES:
        begin = round(done * _BAR_WIDTH)
        done += account.time_s[cause] / (account.whole_s or 1.0)
        bar.append("█" * (round(done * _BAR_WIDTH) - begin), style=CAUSE_COLORS[cause])
        if account.time_s[cause] > 0.005 * account.whole_s:
            legend.append("█ ", style=CAUSE_COLORS[cause])
            legend.append(f"{cause_name(cause)} {duration_text(account.time_s[cause])}   ")
    lines = Group(
        Text(after, "bold"),
        Text(whole),
        bar,
        legend,
        Text(counts_line(account).partition(";")[0], "dim"),
        *([Text(changes, "dim")] if (changes := changes_line(account)) else []),
    )
    return Padding(lines, (1, 0, 0, 0))


def _tasks(tasks: Sequence[TaskView]) -> RenderableType:
    table = Table(title_justify="left")
    table.add_column("process", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "last heard", "holds up a step by", "host memory", "device memory"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for task in tasks[:_MAX_TASKS]:
        delay = _delay_text(task)
        limit = f" of {bytes_text(task.device_limit_bytes)}" if task.device_limit_bytes else ""
        is_done = task.phase in ("finished", "failed")
        table.add_row(
            task.task,
            Text(task.phase, _PHASE_STYLES[task.phase]),
            "-" if task.step is None else f"{task.step:,}",
            "-" if is_done else f"{task.heard_s:.0f} s ago",
            Text(delay, "bold red"),
            bytes_text(task.host_bytes),
            f"{bytes_text(task.device_bytes)}{limit}",
            Text(task.note),
        )
    more = len(tasks) - _MAX_TASKS
    if more > 0:
        table.add_row(f"and {more} more", *[""] * 7)
    return Padding(table, (1, 0, 0, 0))


def _delay_text(task: TaskView) -> str:
    if task.late_s is None:
        return "-"
    cause = "" if task.cause in (None, Cause.UNKNOWN.value) else f" ({task.cause})"
    return f"{duration_text(task.late_s)}{cause}"


# Loops over a growing run folder: one frame, a live terminal, or exports only.

# Prometheus scrapes once a minute or more often.
_LINGER_S = 60.0


def print_frame(name: str, watcher: Watcher) -> None:
    """Prints one frame; raises NotFoundError without events."""
    state = watcher.poll_existing()
    Console().print(frame(name, state, watcher.account()))


def show_live(name: str, watcher: Watcher, interval_s: float) -> None:
    """Shows a frame per interval until the run is over; the last one stays."""
    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            state = watcher.poll()
            live.update(frame(name, state, watcher.account()), refresh=True)
            if state.is_over:
                return
            time.sleep(interval_s)


def export(watcher: Watcher, interval_s: float) -> None:
    """Reads new events until the run has been over for a minute, so that its end is scraped."""
    over_s: float | None = None
    while over_s is None or time.monotonic() - over_s < _LINGER_S:
        is_over = watcher.poll().is_over
        if not is_over:
            over_s = None
        elif over_s is None:
            over_s = time.monotonic()
        time.sleep(interval_s)

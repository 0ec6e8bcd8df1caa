"""Tables of a profile, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.observe.profiling.summary import ProfileSummary

_MEANINGS = {
    "compute": "devices compute",
    "collectives": "devices exchange data or wait for others",
    "copies": "devices wait for copies from or to the host",
    "launch": "devices are between two operations",
    "input": "devices idle, the host loads a batch",
    "compilation": "devices idle, the host compiles",
    "host": "devices idle, the host does other work",
}


def show(
    summary: ProfileSummary, title: str, *, top: int = 10, console: Console | None = None
) -> None:
    """Prints the shares of a profile and its `top` longest operations."""
    console = console or Console(highlight=False)
    devices = "device" if summary.num_devices == 1 else "devices"
    steps = f"{summary.num_steps} steps of {_ms(summary.step_s)}"
    whole = steps if summary.num_steps else f"{_ms(summary.whole_s)}, without marks of steps"
    busy = f"busy {summary.busy_share:.0%}"
    on = f"{summary.num_devices} {summary.platform.upper()} {devices}"
    console.print(Text(f"{title}: {whole}, {on}, {busy}"), style="bold", soft_wrap=True)
    console.print(_parts_table(summary))
    if summary.collectives_s:
        each_s = summary.collectives_s / (summary.num_steps or 1)
        text = f"Collectives take {_ms(each_s)}; compute hides {summary.overlapped_share:.0%}."
        console.print(Text(text))
    if summary.is_input_bound:
        console.print(Text(_input_verdict(summary)))
    if top:
        console.print(_operations_table(summary, top))


def _input_verdict(summary: ProfileSummary) -> str:
    """Says that the input is the limit, and if more cores would help."""
    verdict = f"Input-bound: the devices wait {summary.share('input'):.0%} of the time for batches"
    needed, has = summary.needed_cores, summary.num_cores
    if needed is None or has is None:
        return f"{verdict}."
    if needed > has:
        return f"{verdict}. The host needs {needed:.1f} cores, and has {has:g}."
    return (
        f"{verdict}. The host needs {needed:.1f} of its {has:g} cores: read in more threads or "
        "processes, unless it waits for a disk or a network."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _parts_table(summary: ProfileSummary) -> Table:
    table = Table(title="Time of a step" if summary.num_steps else "Time", title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("meaning")
    for part, seconds in summary.parts_s.items():
        if seconds or part in ("compute", "collectives", "input", "host"):
            each_s = seconds / (summary.num_steps or 1)
            table.add_row(part, f"{summary.share(part):.1%}", _ms(each_s), _MEANINGS[part])
    return table


def _operations_table(summary: ProfileSummary, top: int) -> Table:
    table = Table(title="Longest operations", title_justify="left")
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=30)
    table.add_column("layer", overflow="fold")
    table.add_column("pass", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for one in summary.operations[:top]:
        table.add_row(
            one.name,
            one.layer or "-",
            one.phase or "-",
            _ms(one.time_s / (summary.num_steps or 1)),
            f"{one.time_s / summary.whole_s:.1%}" if summary.whole_s else "-",
        )
    return table

"""What killed processes have cost, as figures, as a table and as a picture of the rate."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

__all__ = ["Resumed", "Row", "draw_rates", "gaps_of", "make_table", "rates_of", "rows_of"]

_BIN_S = 1.0
_AROUND_S = 20.0
_COLORS = ("#2a78b8", "#d9702b")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        case: what was killed.
        what: the figure is.
        text: with its unit.
        is_good: whether it is what was promised; None where nothing was.
    """

    case: str
    what: str
    text: str
    is_good: bool | None = None


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A coordinator that was killed and started again.

    Args:
        last_version: the last number of updates that the killed one has told.
        restored: with how many updates the servers began after it.
        start_s: from its start to the first step.
        end_s: from the kill to the end of all that it had started.
    """

    last_version: int
    restored: Sequence[int]
    start_s: float
    end_s: float

    @property
    def num_lost(self) -> int:
        """How many updates were lost, of what was told."""
        return max(0, self.last_version - min(self.restored))


def rates_of(told: Mapping[str, Any]) -> list[float]:
    """Returns how many were done a second, in each second but the last, which is not whole.

    Args:
        told: what the worker has told.
    """
    ends = [end_s - told["begin_s"] for end_s in told["ends"]]
    counts = [0] * int(max(ends) // _BIN_S)
    for end_s in ends:
        if 0 <= end_s < len(counts) * _BIN_S:
            counts[int(end_s // _BIN_S)] += 1
    return [count / _BIN_S for count in counts]


def gaps_of(told: Mapping[str, Any]) -> list[float]:
    """Returns the longest time without a step, around each kill.

    Args:
        told: what the worker has told.
    """
    gaps: list[float] = []
    for at_s, *_ in told["kills"]:
        near = [end_s for end_s in told["ends"] if at_s - _BIN_S < end_s < at_s + _AROUND_S]
        gaps.append(max((b - a for a, b in itertools.pairwise(near)), default=_AROUND_S))
    return gaps


def rows_of(
    workers: Mapping[str, Any] | None, servers: Mapping[str, Any] | None, resumed: Resumed | None
) -> list[Row]:
    """Returns the figures of what was measured.

    Args:
        workers: what was told of killed workers.
        servers: of killed servers.
        resumed: of a killed coordinator.
    """
    rows: list[Row] = []
    if workers is not None:
        rows += _of_workers(workers)
    if servers is not None:
        rows += _of_servers(servers)
    if resumed is not None:
        rows += [
            Row("coordinator", "updates lost", str(resumed.num_lost)),
            Row(
                "coordinator",
                "goes on after",
                f"{resumed.last_version} with {min(resumed.restored)} updates",
                min(resumed.restored) > 0,
            ),
            Row("coordinator", "start to first step", f"{resumed.start_s:.1f} s"),
            Row("coordinator", "kill to the end of all it started", f"{resumed.end_s:.1f} s"),
        ]
    return rows


def _of_workers(told: Mapping[str, Any]) -> list[Row]:
    kills = [at_s - told["begin_s"] for at_s, *_ in told["kills"]]
    rates = rates_of(told)
    before = rates[: int(kills[0])]
    while_killed = rates[int(kills[0]) : int(kills[-1])]
    after = rates[int(kills[-1]) + 5 :]
    phases = {"before": before, "while killed": while_killed, "5 s after": after}
    count, returns = told["num_functions"], told["returns"]
    return [
        Row("workers", "killed", f"{len(kills)} in {kills[-1] - kills[0]:.0f} s"),
        Row(
            "workers",
            "functions that never ran, or wrong",
            f"{told['num_never_run']} and {told['num_wrong']} of {count:,}",
            told["num_never_run"] == told["num_wrong"] == 0,
        ),
        Row("workers", "functions that ran again", str(told["num_runs"] - count)),
        Row(
            "workers",
            "counted in a metric",
            f"{told['counted']:,.0f} of {told['to_count']:,.0f}",
            told["counted"] == told["to_count"],
        ),
        *(
            Row("workers", f"functions/s {phase}", f"{statistics.median(rates):.0f}")
            for phase, rates in phases.items()
            if rates
        ),
        Row("workers", "return, median", f"{statistics.median(returns):.2f} s"),
        Row("workers", "return, worst", f"{max(returns):.2f} s"),
        Row("workers", "return, CPU, median", f"{statistics.median(told['cpu_s']):.2f} s"),
    ]


def _of_servers(told: Mapping[str, Any]) -> list[Row]:
    gaps = gaps_of(told)
    lost = sum(told["lost"])
    return [
        Row("server", "killed", f"{len(gaps)} times"),
        Row("server", "no step, median", f"{statistics.median(gaps):.2f} s", max(gaps) < 10.0),
        Row("server", "no step, worst", f"{max(gaps):.2f} s", max(gaps) < 10.0),
        Row("server", "updates lost", f"{lost} of {told['num_steps'] * len(told['lost']):,}"),
        Row("server", "told to be lost", str(told["told_lost"])),
    ]


def make_table(rows: Sequence[Row]) -> Table:
    """Returns a table of the figures."""
    table = Table(title="Processes of a cluster are killed", title_justify="left")
    for header in ("killed", "what"):
        table.add_column(header)
    table.add_column("figure", justify="right", no_wrap=True)
    for row in rows:
        color = {True: "green", False: "red", None: "default"}[row.is_good]
        table.add_row(row.case, row.what, f"[{color}]{row.text}[/]")
    return table


def draw_rates(path: Path, runs: Mapping[str, Mapping[str, Any]], subtitle: str) -> None:
    """Writes a picture: of each run the rate over time, and when something was killed.

    Args:
        path: of the picture.
        runs: what was told, by the title.
        subtitle: what it was measured on.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 0.8 + 2.6 * len(runs)), layout="constrained")
    for axes, color, (title, told) in zip(
        figure.subplots(len(runs), squeeze=False)[:, 0], _COLORS, runs.items(), strict=False
    ):
        rates = rates_of(told)
        axes.step(range(len(rates)), rates, where="post", color=color, lw=1.4)
        for at_s, *_ in told["kills"]:
            axes.axvline(at_s - told["begin_s"], color="#b03030", lw=0.8, ls=":")
        axes.set_ylim(0, 1.1 * max(rates))
        axes.set_xlim(0, len(rates))
        axes.set_title(f"{title}; dotted: a SIGKILL", fontsize=10, loc="left")
        axes.set_ylabel("done in a second")
        axes.set_xlabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(subtitle, fontsize=8, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

"""Table and file of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.compare.intervals import Verdict
from benchmarks.compare.rounds import Compared

__all__ = ["QUIET_CORES", "is_quiet", "make_table", "rows_of"]

# Other programs' use of the machine, in cores, above which no verdict is printed.
QUIET_CORES = 0.25

_COLORS = {Verdict.HELD: "green", Verdict.BROKEN: "red", Verdict.UNDECIDED: "yellow"}


def is_quiet(results: Sequence[Compared]) -> bool:
    """Returns False if other programs used the machine."""
    return max((cores for one in results for cores in one.busy_cores), default=0.0) <= QUIET_CORES


def make_table(results: Sequence[Compared], base: str, bound: float) -> Table:
    """Returns a row for each case; without verdicts after a run under load."""
    table = Table(title=f"Speed of the working tree relative to {base}", title_justify="left")
    table.add_column("case")
    for header in ("ms", "ms, base", "ratio", "95% interval", "noise"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column(f"at most {bound:.0%} slower?", no_wrap=True)
    judges = is_quiet(results)
    for row, one in zip(rows_of(results), results, strict=True):
        verdict = one.interval.verdict(bound)
        table.add_row(
            one.case,
            f"{row['ours_s'] * 1e3:,.3f}",
            f"{row['base_s'] * 1e3:,.3f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['noise']:.1%}",
            f"[{_COLORS[verdict]}]{verdict.value}[/]" if judges else "not judged",
        )
    return table


def rows_of(results: Sequence[Compared]) -> list[dict[str, Any]]:
    """Returns the figures of each case, for a file."""
    return [
        {
            "case": one.case,
            "ours_s": _median_s(one, 0),
            "base_s": _median_s(one, 1),
            "ratio": one.interval.ratio,
            "low": one.interval.low,
            "high": one.interval.high,
            "noise": one.noise,
            "times_s": one.times_s,
            "busy_cores": one.busy_cores,
        }
        for one in results
    ]


def _median_s(one: Compared, place: int) -> float:
    times_s = sorted(time_s for start in one.times_s[place] for time_s in start)
    return times_s[len(times_s) // 2]

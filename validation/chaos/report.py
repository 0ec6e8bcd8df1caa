"""Reports of campaigns: a table kind by outcome, times to notice and to resume, and a plot."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from validation.chaos.jobs import GOOD

__all__ = ["plot", "table", "times"]

_BAD = ("wrong", "hang", "leftover", "unnamed", "broken")
Result = dict[str, Any]


def _kind(fault: dict[str, Any]) -> str:
    """The kind of a fault, with the kind of the process it struck."""
    strikes_one = fault["kind"].startswith(("SIG", "OOM", "partition", "half-open", "reset"))
    where = fault["where"].rstrip(" 0123456789")
    return f"{fault['kind']}: {where}" if strikes_one else fault["kind"]


def _by_kind(results: Iterable[Result]) -> dict[str, list[tuple[Result, dict[str, Any]]]]:
    kinds: dict[str, list[tuple[Result, dict[str, Any]]]] = collections.defaultdict(list)
    for result in results:
        for fault in result["faults"]:
            kinds[_kind(fault)].append((result, fault))
    return dict(sorted(kinds.items()))


def table(results: Sequence[Result]) -> rich.table.Table:
    """Faults by kind and by the outcome of their trial."""
    made = rich.table.Table(title=f"{len(results)} trials")
    shown = [*GOOD, *_BAD]
    for column in ("fault", *shown, "noticed (s)", "stepping again (s)"):
        made.add_column(column, justify="left" if column == "fault" else "right")
    for kind, pairs in _by_kind(results).items():
        counts = collections.Counter(result["outcome"] for result, _ in pairs)
        faults = [fault for _, fault in pairs]
        noticed, resumed = times(faults, "detected_s"), times(faults, "resumed_s")
        made.add_row(kind, *(str(counts[one] or "") for one in shown), noticed, resumed)
    counts = collections.Counter(result["outcome"] for result in results)
    made.add_row("trials", *(str(counts[one] or "") for one in shown), "", "")
    return made


def times(faults: Sequence[dict[str, Any]], name: str) -> str:
    """Median and 99th percentile of a time, over the faults that have it."""
    values = [fault[name] for fault in faults if fault.get(name) is not None]
    if not values:
        return ""
    return " / ".join(f"{value:.1f}" for value in np.percentile(values, (50, 99)))


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws the times to notice and to resume, a row for each kind."""
    from matplotlib.figure import Figure

    kinds = _by_kind(results)
    figure = Figure(figsize=(8, 1 + 0.3 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    for name, color in (("resumed_s", "tab:orange"), ("detected_s", "tab:blue")):
        points = [
            (fault[name], row)
            for row, pairs in enumerate(kinds.values())
            for _, fault in pairs
            if fault.get(name) is not None
        ]
        label = {"resumed_s": "stepping again", "detected_s": "noticed"}[name]
        times_s, rows = [point[0] for point in points], [point[1] for point in points]
        axes.scatter(times_s, rows, s=9, color=color, label=label)
    axes.set_yticks(range(len(kinds)), list(kinds))
    axes.set_xlabel("seconds after the fault")
    axes.set_xscale("symlog")
    axes.legend()
    figure.savefig(path)

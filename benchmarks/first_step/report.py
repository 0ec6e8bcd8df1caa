"""First steps and starts of processes as tables, as rows of a file and as a plot."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.first_step.cases import PEERS, REFERENCE
from benchmarks.report import Row, make_row_of_times
from benchmarks.runner import paired_ratios

__all__ = [
    "SECONDS",
    "FirstStep",
    "Start",
    "describe",
    "draw_first_steps",
    "make_start_table",
    "make_table",
    "peer_ratios",
]

# What is measured in each round, and, without the last, compared.
SECONDS = ("first_step_s", "first_step_cpu_s", "from_start_s", "second_step_s")

_OURS, _THEIRS = "#2a78b8", "#8a8f94"
_BOUNDS = {1.15: "wanted, cold", 0.5: "wanted, warm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstStep:
    """Times of a side and a workload, in seconds of each round.

    Args:
        workload: its title.
        name: of the side.
        is_warm: whether its persistent cache was filled.
        wanted: the largest ratio of its first step to that of plain Keras, cold.
        first_step_s: from the call of `fit`, or of the training loop, to the end of a step.
        first_step_cpu_s: processor time of this, without that of other processes: it hardly
            depends on what else runs on the machine.
        from_start_s: from the start of the process to the same end.
        second_step_s: another call for a step.
    """

    workload: str
    name: str
    is_warm: bool
    wanted: float | None
    first_step_s: Sequence[float]
    first_step_cpu_s: Sequence[float]
    from_start_s: Sequence[float]
    second_step_s: Sequence[float]

    def ratios(self, reference: FirstStep) -> dict[str, list[float]]:
        """Returns the seconds over those of a reference, round by round, as far as both went."""
        return {
            key: paired_ratios(ours := getattr(self, key), getattr(reference, key)[: len(ours)])
            for key in SECONDS[:-1]
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A start, in seconds of each round, and one that it is compared with.

    Args:
        name: of the start.
        seconds: how long it took.
        reference_name: of the other; empty for none.
        reference_s: how long that took.
        wanted: the largest ratio.
        wanted_s: the most seconds.
    """

    name: str
    seconds: Sequence[float]
    reference_name: str = ""
    reference_s: Sequence[float] = ()
    wanted: float | None = None
    wanted_s: float | None = None

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios; None without a reference."""
        if not self.reference_s:
            return None
        return statistics.median(paired_ratios(self.seconds, self.reference_s))

    @property
    def is_as_wanted(self) -> bool:
        if self.ratio is not None and self.wanted is not None:
            return self.ratio <= self.wanted
        return self.wanted_s is None or statistics.median(self.seconds) <= self.wanted_s

    def described(self) -> dict[str, Any]:
        """The row of the file."""
        return {
            **dataclasses.asdict(self),
            "median_s": statistics.median(self.seconds),
            "ratio": self.ratio,
        }


def describe(rows: Sequence[FirstStep]) -> list[dict[str, Any]]:
    """Returns the rows of the file: all seconds, their medians, and ratios to plain Keras, cold."""
    references = _references(rows)
    return [
        {
            **dataclasses.asdict(row),
            "medians": {key: statistics.median(getattr(row, key)) for key in SECONDS},
            "ratios": _ratios(row, references),
        }
        for row in rows
    ]


def peer_ratios(rows: Sequence[FirstStep]) -> list[Row]:
    """Returns ours beside plain Keras on as many devices, each with the same kind of cache."""
    found = {(row.workload, row.name): row for row in rows}
    return [
        make_row_of_times(
            f"{workload}, {one.name.partition(', ')[2]}", one.first_step_s, peer.first_step_s, name
        )
        for (workload, own_name), one in found.items()
        for ours, name in PEERS.items()
        if own_name == ours and (peer := found.get((workload, name)))
    ]


def make_table(rows: Sequence[FirstStep]) -> Table:
    """Returns a row for each workload and side."""
    title = f"first_step: seconds, medians of the rounds, and ratios to {REFERENCE}, cold"
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    table.add_column("side", no_wrap=True)
    for header in ("first step", "ratio", "wanted", "CPU", "ratio", "from start", "ratio", "next"):
        table.add_column(header, justify="right", no_wrap=True)
    references = _references(rows)
    for workload, group in itertools.groupby(rows, lambda row: row.workload):
        for place, row in enumerate(group):
            ratios = _ratios(row, references)
            table.add_row(
                "" if place else workload,
                row.name,
                f"{statistics.median(row.first_step_s):.2f}",
                _colored(_median(ratios, "first_step_s"), row.wanted),
                f"≤ {row.wanted:.2f}" if row.wanted else "",
                f"{statistics.median(row.first_step_cpu_s):.2f}",
                _colored(_median(ratios, "first_step_cpu_s"), None),
                f"{statistics.median(row.from_start_s):.2f}",
                _colored(_median(ratios, "from_start_s"), None),
                f"{statistics.median(row.second_step_s):.3f}",
            )
        table.add_section()
    return table


def make_start_table(starts: Sequence[Start]) -> Table:
    """Returns a row for each start."""
    title = "first_step: starts in seconds, medians of the rounds"
    table = Table(title=title, title_justify="left")
    table.add_column("start")
    table.add_column("seconds", justify="right")
    table.add_column("reference")
    for header in ("seconds", "ratio", "wanted"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in starts:
        color = "green" if one.is_as_wanted else "yellow"
        seconds = f"{statistics.median(one.seconds):.3f}"
        table.add_row(
            one.name,
            seconds if one.ratio is not None else f"[bold {color}]{seconds}[/]",
            one.reference_name,
            f"{statistics.median(one.reference_s):.3f}" if one.reference_s else "",
            "" if one.ratio is None else f"[bold {color}]{one.ratio:.2f}[/]",
            f"≤ {one.wanted:.2f}" if one.ratio is not None else f"≤ {one.wanted_s:.1f} s",
        )
    return table


def draw_first_steps(path: Path, rows: Sequence[FirstStep], subtitle: str) -> None:
    """Writes a picture: for each workload and side the ratios to plain Keras, with their range.

    Args:
        path: of the picture.
        rows: all figures.
        subtitle: what they were measured on.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    references = _references(rows)
    rows = [row for row in rows if row.workload in references]
    places = _places(rows)
    height = 1.8 + 0.27 * (places[-1] + 1 if places else 1)
    figure = Figure(figsize=(11.0, height), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "first_step_s": "from the call of fit",
        "from_start_s": "from the start of the process",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for place, row in zip(places, rows, strict=True):
            _draw_point(axes, place, row, row.ratios(references[row.workload])[key])
        axes.axvline(1, color="black", linewidth=1)
        if key == "first_step_s":
            for bound, label in _BOUNDS.items():
                style = "--" if bound > 1 else ":"
                axes.axvline(bound, color="#d9702b", linewidth=1.2, linestyle=style, label=label)
            figure.legend(ncols=2, fontsize=8, frameon=False, loc="outside lower center")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.minorticks_off()
        axes.margins(x=0.14)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(f"seconds over those of {REFERENCE}, cold")
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(places, [f"{row.workload}  |  {row.name}" for row in rows], fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle(
        "first_step: time to the end of the first step; filled cold, hollow with a warm cache\n"
        f"{subtitle}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_point(axes: Any, place: float, row: FirstStep, ratios: Sequence[float]) -> None:
    color = _OURS if row.name.startswith("Stratagem") else _THEIRS
    axes.plot([min(ratios), max(ratios)], [place] * 2, color=color, linewidth=1.4)
    median = statistics.median(ratios)
    face = "white" if row.is_warm else color
    axes.plot(median, place, "o", markersize=7, color=color, markerfacecolor=face)
    axes.annotate(
        f"{median:.2f}",
        (max(ratios), place),
        (7, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="#333333",
    )


def _references(rows: Sequence[FirstStep]) -> dict[str, FirstStep]:
    return {row.workload: row for row in rows if row.name == REFERENCE}


def _ratios(row: FirstStep, references: Mapping[str, FirstStep]) -> dict[str, list[float]]:
    """None where plain Keras failed."""
    reference = references.get(row.workload)
    return row.ratios(reference) if reference else {}


def _places(rows: Sequence[FirstStep]) -> list[float]:
    """Returns a height for each row, with a gap between workloads."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    return [number + 0.8 * workloads.index(row.workload) for number, row in enumerate(rows)]


def _median(ratios: Mapping[str, Sequence[float]], key: str) -> float | None:
    return statistics.median(ratios[key]) if ratios else None


def _colored(ratio: float | None, wanted: float | None) -> str:
    if ratio is None:
        return ""
    if wanted is None:
        return f"{ratio:.2f}"
    return f"[bold {'green' if ratio <= wanted else 'yellow'}]{ratio:.2f}[/]"

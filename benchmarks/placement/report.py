"""Where variables are kept, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.placement.cases import Case, Placed
from benchmarks.runner import paired_ratios
from benchmarks.workers.placement_work import PINNED

__all__ = ["MEANING", "Figures", "as_json", "draw", "make_table"]

MEANING = """\
steps/s: of `fit`, median of the rounds; the ratio is the median of those of the rounds.
held: MB (10^6 bytes) of all arrays that live on a device after `fit`: the replica's with the most,
  the device that is no replica's, and pinned memory of the host, for all replicas.
moved: MB a step that reach a device which does not have them, all devices together.
  In programs: by collectives. Which ran, and how often, is read from the profile of an epoch, how
  large they are from the programs. Of n devices and S bytes an all-reduce counts 2(n-1)S, an
  all-gather of S in all (n-1)S, a reduce-scatter of S on each (n-1)S, as the best algorithms do.
  To replicas, to the other device: by transfers, counted at the calls that make them; on CPUs XLA
  must tell of as many. The batch itself, which comes from NumPy arrays, is not in it, nor what
  a step brings over from pinned memory, which is all that is held there, and puts back."""

_COLORS = {
    "in programs": "#2a78b8",
    "to replicas": "#2f9e6e",
    "to the other": "#c9a227",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of a side; bytes moved are of a step.

    Args:
        name: of the side.
        held_bytes: on the replicas' device that holds the most.
        other_held_bytes: on the device that is no replica's.
        pinned_bytes: in pinned memory of the host, for all replicas.
        peak_bytes: the most that a replica's device held at once; None where it does not tell.
        exchanged_bytes: in programs, by program and kind of exchange.
        to_replicas_bytes: sent to their devices.
        to_other_bytes: sent to the other.
        fed_bytes: sent from the host to all: the batch.
        difference: of its weights from those of the first side.
        steps_per_s: of each round.
    """

    name: str
    held_bytes: int
    other_held_bytes: int
    pinned_bytes: int
    peak_bytes: int | None
    exchanged_bytes: Mapping[str, float]
    to_replicas_bytes: float
    to_other_bytes: float
    fed_bytes: float
    difference: float
    steps_per_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, case: Case, placed: Placed, told: Mapping[str, Any], difference: float) -> Figures:
        """Reads what a worker answered.

        Args:
            case: that it belongs to.
            placed: its side.
            told: of "traffic" and "held".
            difference: of its weights.
        """
        replicas, other, steps = placed.options.devices, case.other_device, told["steps"]
        peaks = [told["peak"][name] for name in replicas if name in told["peak"]]
        return cls(
            name=placed.name,
            held_bytes=max(told["held"].get(name, 0) for name in replicas),
            other_held_bytes=told["held"].get(other, 0),
            pinned_bytes=sum(told["held"].get(f"{name} {PINNED}", 0) for name in replicas),
            peak_bytes=max(peaks) if peaks else None,
            exchanged_bytes={name: size / steps for name, size in told["exchanged"].items()},
            to_replicas_bytes=sum(told["sent"].get(name, 0) for name in replicas) / steps,
            to_other_bytes=told["sent"].get(other, 0) / steps,
            fed_bytes=sum(told["fed"].values()) / steps,
            difference=difference,
        )

    @property
    def moved_bytes(self) -> dict[str, float]:
        """What moved in a step, by the way that it took."""
        return {
            "in programs": sum(self.exchanged_bytes.values()),
            "to replicas": self.to_replicas_bytes,
            "to the other": self.to_other_bytes,
        }

    @property
    def median_steps_per_s(self) -> float:
        return statistics.median(self.steps_per_s)


def make_table(case: Case, results: Sequence[Figures]) -> Table:
    """Returns a row for each side."""
    options = case.sides[0].options
    title = (
        f"placement: {case.name}; {options.num_rows:,} rows of {options.row_size}, "
        f"batch {options.batch_size}, {len(options.devices)} replicas"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("variables under", no_wrap=True)
    headers = ["steps/s", "ratio", "min", "max", "held:\nreplica", f"held:\n{case.other_device}"]
    headers += [
        "held:\npinned",
        "moved: in\nprograms",
        "moved: to\nreplicas",
        f"moved: to\n{case.other_device}",
    ]
    # Where devices tell of their peak there is one replica, and nothing goes by programs.
    has_peak = any(one.peak_bytes is not None for one in results)
    headers += ["peak:\nreplica" if has_peak else "moved\nin all"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for one in results:
        ratios = paired_ratios(one.steps_per_s, results[0].steps_per_s)
        color = "green" if statistics.median(ratios) >= 1 else "yellow"
        last = (one.peak_bytes or 0) if has_peak else sum(one.moved_bytes.values())
        held = (one.held_bytes, one.other_held_bytes, one.pinned_bytes)
        sizes = (*held, *one.moved_bytes.values(), last)
        table.add_row(
            one.name,
            f"{one.median_steps_per_s:,.2f}",
            f"[bold {color}]{statistics.median(ratios):.2f}[/]",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            *(f"{size / 1e6:,.{0 if size >= 1e9 else 2}f}" for size in sizes),
        )
    return table


def as_json(case: Case, results: Sequence[Figures]) -> list[dict[str, Any]]:
    """Returns a row for each side, with all that was measured."""
    return [
        {
            "case": case.name,
            **dataclasses.asdict(one),
            "moved_bytes": one.moved_bytes,
            "ratios": paired_ratios(one.steps_per_s, results[0].steps_per_s),
            "options": dataclasses.asdict(placed.options),
        }
        for one, placed in zip(results, case.sides, strict=True)
    ]


def draw(path: Path, results: Mapping[str, Sequence[Figures]], subtitle: str) -> None:
    """Writes a picture: for each case speed, what devices hold, and what moves.

    Args:
        path: of the picture.
        results: by the name of their case.
        subtitle: what they were measured on.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 0.8 + 2.4 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 3, squeeze=False)
    for row, (name, sides) in zip(panels, results.items(), strict=True):
        names = [one.name for one in sides]
        for axes in row:
            axes.set_yticks(range(len(names)), names if axes is row[0] else [], fontsize=9)
            axes.invert_yaxis()
            axes.margins(x=0.16)
            axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_title(name, fontsize=10, loc="left")
        _bars(row[0], {"": [one.median_steps_per_s for one in sides]}, "{:,.1f}")
        row[0].set_xlabel("steps a second", fontsize=9)
        held = [one.held_bytes / 1e6 for one in sides]
        _bars(row[1], {"": held}, "{:,.1f}")
        row[1].set_xlabel("MB held on a replica's device", fontsize=9)
        moved = [one.moved_bytes for one in sides]
        _bars(row[2], {way: [one[way] / 1e6 for one in moved] for way in _COLORS}, "{:,.1f}")
        row[2].set_xlabel("MB moved a step", fontsize=9)
    ways = panels[0][2].get_legend_handles_labels()
    figure.legend(*ways, loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"placement: where variables are kept\n{subtitle}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bars(axes: Any, parts: Mapping[str, Sequence[float]], form: str) -> None:
    """Draws bars of parts behind one another, each with its whole."""
    ends = [0.0] * len(next(iter(parts.values())))
    for way, values in parts.items():
        color = _COLORS.get(way, "#2a78b8")
        axes.barh(range(len(values)), values, 0.68, left=ends, color=color, label=way or None)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for place, end in enumerate(ends):
        axes.text(end, place, " " + form.format(end), va="center", fontsize=8)

"""Growth as a table and as a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.growth.axes import COSTS
from benchmarks.growth.exponents import MOST, exponent

__all__ = ["Growth", "draw_growth", "make_table"]

_OURS, _BY_HAND = "#2a78b8", "#8a949e"
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclasses.dataclass(frozen=True)
class Growth:
    """One cost at all sizes of an axis, in seconds.

    Args:
        axis: name of the axis.
        cost: key of `COSTS`.
        sizes: in ascending order.
        ours_s: of `strategy.run`, one for each size.
        by_hand_s: of the same step in JAX.
    """

    axis: str
    cost: str
    sizes: list[int]
    ours_s: list[float]
    by_hand_s: list[float]

    @property
    def exponents(self) -> tuple[float, float]:
        """Exponents of both sides."""
        return exponent(self.sizes, self.ours_s), exponent(self.sizes, self.by_hand_s)

    @property
    def is_steep(self) -> bool:
        """True if ours grows faster than n log n, and than the step by hand."""
        ours, by_hand = self.exponents
        return ours > max(MOST, by_hand + MOST - 1)


def make_table(results: Sequence[Growth]) -> Table:
    """Returns a row for each cost and size."""
    table = Table(title="growth: strategy.run and a step by hand", title_justify="left")
    for header in ("grows", "cost", "size", "run", "by hand", "difference / size", "exponents"):
        is_name = header in ("grows", "cost")
        table.add_column(header, justify="left" if is_name else "right", no_wrap=True)
    for one in results:
        rows = list(zip(one.sizes, one.ours_s, one.by_hand_s, strict=True))
        for size, ours_s, by_hand_s in rows:
            is_first, is_last = size == one.sizes[0], size == one.sizes[-1]
            color = "yellow" if one.is_steep else "green"
            ours, by_hand = one.exponents
            table.add_row(
                one.axis if is_first else "",
                COSTS[one.cost] if is_first else "",
                f"{size:,}",
                time_text(ours_s),
                time_text(by_hand_s),
                time_text((ours_s - by_hand_s) / size),
                f"[{color}]{ours:.2f}[/], {by_hand:.2f}" if is_last else "",
                end_section=is_last,
            )
    return table


def time_text(seconds: float) -> str:
    """Returns a time with three figures and its unit."""
    unit = next((unit for unit in _UNITS if abs(seconds) * _UNITS[unit] >= 1), "us")
    return f"{seconds * _UNITS[unit]:.3g} {unit}"


def draw_growth(path: Path, results: Sequence[Growth], subtitle: str) -> None:
    """Writes a picture: one panel for each axis and cost, with logarithmic scales."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(one.axis for one in results))
    costs = list(dict.fromkeys(one.cost for one in results))
    figure = Figure(figsize=(3.4 * len(costs), 2.9 * len(names) + 0.7), layout="constrained")
    grid = figure.subplots(len(names), len(costs), squeeze=False)
    for one in results:
        axes = grid[names.index(one.axis)][costs.index(one.cost)]
        for label, color, seconds, steepness in (
            ("by hand in JAX", _BY_HAND, one.by_hand_s, one.exponents[1]),
            ("strategy.run", _OURS, one.ours_s, one.exponents[0]),
        ):
            label = f"{label}: exponent {steepness:.2f}"
            axes.loglog(one.sizes, seconds, marker="o", markersize=3.5, color=color, label=label)
        axes.set_xlabel(one.axis)
        axes.set_ylabel("seconds")
        axes.set_title(COSTS[one.cost], fontsize=10)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False)
    figure.suptitle(f"How the cost of a step grows\n{subtitle}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

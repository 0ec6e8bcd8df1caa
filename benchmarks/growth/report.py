"""Growth as a table and as a plot."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.growth.exponents import MOST, exponent

__all__ = ["Growth", "draw_growth", "make_table"]

_COLORS = ("#2a78b8", "#d1703c", "#3f9a5a", "#8a5cb8", "#b8862a")
_GUIDE = "#c4c9ce"
_NUM_COLUMNS = 3
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """One cost at all sizes of an axis, in seconds.

    Args:
        axis: name of the axis.
        cost: title of the cost.
        clock: "elapsed" or "CPU": the time that is meant.
        sizes: in ascending order.
        ours_s: one for each size.
        by_hand_s: of the same work without Stratagem; empty if there is none.
    """

    axis: str
    cost: str
    clock: str
    sizes: Sequence[int]
    ours_s: Sequence[float]
    by_hand_s: Sequence[float] = ()

    @property
    def exponents(self) -> tuple[float, ...]:
        """Exponent of ours, and of the work by hand if there is any."""
        sides = [self.ours_s, *([self.by_hand_s] if self.by_hand_s else [])]
        return tuple(exponent(self.sizes, seconds) for seconds in sides)

    @property
    def is_steep(self) -> bool:
        """True if ours grows faster than n log n, and than the work by hand."""
        ours, *by_hand = self.exponents
        return ours > max([MOST, *(one + MOST - 1 for one in by_hand)])


def make_table(results: Sequence[Growth]) -> Table:
    """Returns a row for each cost and size."""
    table = Table(title="growth of costs, in seconds of each clock", title_justify="left")
    for header in ("grows", "cost", "size", "ours", "by hand", "ours / size", "exponents"):
        is_name = header in ("grows", "cost")
        table.add_column(header, justify="left" if is_name else "right", no_wrap=True)
    previous = None
    for one in results:
        for index, (size, ours_s) in enumerate(zip(one.sizes, one.ours_s, strict=True)):
            is_first, is_last = not index, index == len(one.sizes) - 1
            ours, *by_hand = [f"{value:.2f}" for value in one.exponents]
            color = "yellow" if one.is_steep else "green"
            table.add_row(
                one.axis if is_first and one.axis != previous else "",
                f"{one.cost} ({one.clock})" if is_first else "",
                f"{size:,}",
                time_text(ours_s),
                time_text(one.by_hand_s[index]) if one.by_hand_s else "",
                time_text(ours_s / size),
                ", ".join([f"[{color}]{ours}[/]", *by_hand]) if is_last else "",
                end_section=is_last,
            )
        previous = one.axis
    return table


def time_text(seconds: float) -> str:
    """Returns a time with three figures and its unit."""
    unit = next((unit for unit in _UNITS if abs(seconds) * _UNITS[unit] >= 1), "us")
    return f"{seconds * _UNITS[unit]:.3g} {unit}"


def draw_growth(path: Path, results: Sequence[Growth], subtitle: str) -> None:
    """Writes a picture: a panel for each axis, with logarithmic scales."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(one.axis for one in results))
    num_rows = math.ceil(len(names) / _NUM_COLUMNS)
    figure = Figure(figsize=(3.9 * _NUM_COLUMNS, 4.1 * num_rows + 0.6), layout="constrained")
    panels = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat
    for panel, name in itertools.zip_longest(panels, names):
        if name is None:
            panel.axis("off")
        else:
            _draw_axis(panel, [one for one in results if one.axis == name])
    figure.suptitle(
        f"How costs grow: exponents over the three largest sizes\n{subtitle}", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_axis(panel: Any, costs: Sequence[Growth]) -> None:
    for one, color in zip(costs, itertools.cycle(_COLORS), strict=False):
        ours, *by_hand = one.exponents
        label = f"{one.cost}, {one.clock}: {ours:.2f}"
        panel.loglog(one.sizes, one.ours_s, marker="o", markersize=3.5, color=color, label=label)
        for value in by_hand:
            style = {"linestyle": ":", "marker": ".", "markersize": 3}
            label = f"by hand, {one.clock}: {value:.2f}"
            panel.loglog(one.sizes, one.by_hand_s, color=color, label=label, **style)
    low, high = panel.get_ylim()
    steepest = max(costs, key=lambda one: one.ours_s[-1])
    guide = [steepest.ours_s[-1] * size / steepest.sizes[-1] for size in steepest.sizes]
    style = {"color": _GUIDE, "linestyle": "--", "zorder": 0}
    panel.loglog(steepest.sizes, guide, label="in proportion", **style)
    panel.set_ylim(low, high)
    panel.set_title(costs[0].axis, fontsize=10, loc="left")
    panel.set_ylabel("seconds")
    panel.grid(color="#ececec", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.minorticks_off()
    panel.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(-0.08, -0.1))

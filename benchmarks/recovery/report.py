"""What kills have cost, as a table and as a plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

__all__ = ["Recovery", "draw_recoveries", "make_table"]

# The bound of the issue that asked for this.
_MOST_S, _MOST_STEPS = 10.0, 1


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What was measured of a side.

    Args:
        name: of the side.
        costs: for each kill, seconds to the next completed step, and completed steps done again.
    """

    name: str
    costs: list[tuple[float, int]]

    @property
    def times_s(self) -> list[float]:
        """Seconds from each kill to the next completed step."""
        return [time_s for time_s, _ in self.costs]

    @property
    def median_s(self) -> float:
        """Their median."""
        return statistics.median(self.times_s)


def make_table(num_workers: int, results: Sequence[Recovery]) -> Table:
    """Returns a row for each side."""
    title = f"recovery: from SIGKILL of one of {num_workers} workers to the next completed step"
    table = Table(title=title, title_justify="left")
    for header in ("side", "kills", "median", "best", "worst", "steps lost", "median / ours"):
        is_name = header == "side"
        table.add_column(header, justify="left" if is_name else "right", no_wrap=is_name)
    for one in results:
        most_lost = max(lost for _, lost in one.costs)
        is_good = one.median_s <= _MOST_S and most_lost <= _MOST_STEPS
        table.add_row(
            one.name,
            str(len(one.costs)),
            f"[bold {'green' if is_good else 'yellow'}]{one.median_s:.1f} s[/]",
            f"{min(one.times_s):.1f} s",
            f"{max(one.times_s):.1f} s",
            f"{most_lost} at most",
            f"{one.median_s / results[0].median_s:.2f}",
        )
    return table


def draw_recoveries(
    path: Path, num_workers: int, results: Sequence[Recovery], subtitle: str
) -> None:
    """Writes a picture: for each side every kill, the median, and the bound."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.6 + 0.6 * len(results)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(results):
        axes.barh(place, one.median_s, height=0.5, color="#9dc3e6")
        axes.plot(one.times_s, [place] * len(one.costs), "o", color="#1f4e79", markersize=4)
        axes.text(
            max(one.times_s), place, f"  median {one.median_s:.1f} s", va="center", fontsize=9
        )
    axes.axvline(_MOST_S, color="#d9702b", lw=1.2, ls="--")
    axes.set_yticks(range(len(results)), [one.name for one in results])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(_MOST_S, *(max(one.times_s) for one in results)))
    axes.set_xlabel("seconds from SIGKILL to the next completed step; dashed: the bound")
    figure.suptitle(f"A worker of {num_workers} is killed", fontsize=12)
    axes.set_title(subtitle, fontsize=8, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

"""Times of calls as a table and as a plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

__all__ = ["Figures", "draw_times", "make_table", "size_name"]

_COLORS = ("#2a78b8", "#9cc3e0", "#d9702b")


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a direction and a size.

    Args:
        direction: "pull" or "push".
        size_bytes: of the array that travels.
        seconds: of each call, by name of the side, ours first.
    """

    direction: str
    size_bytes: int
    seconds: Mapping[str, Sequence[float]]

    def best_s(self, name: str) -> float:
        """The shortest call of a side."""
        return min(self.seconds[name])

    def median_s(self, name: str) -> float:
        """The median of a side's calls."""
        return statistics.median(self.seconds[name])

    def speed_over(self, name: str) -> float:
        """Our speed over that of another side: above 1 we are faster."""
        ours = next(iter(self.seconds))
        return self.median_s(name) / self.median_s(ours)


def make_table(results: Sequence[Figures]) -> Table:
    """Returns a row for each direction and size."""
    table = Table(title="transport: milliseconds of a call, best and median", title_justify="left")
    ours, *others = results[0].seconds
    table.add_column("direction")
    for header in ("bytes", ours, *others, *(f"speed / {name}" for name in others)):
        table.add_column(header, justify="right")

    def in_ms(one: Figures, name: str) -> str:
        return f"{one.best_s(name) * 1e3:.3f} {one.median_s(name) * 1e3:.3f}"

    for place, one in enumerate(results):
        is_first = place == 0 or results[place - 1].direction != one.direction
        if place and is_first:
            table.add_section()
        table.add_row(
            one.direction if is_first else "",
            size_name(one.size_bytes),
            *(in_ms(one, name) for name in one.seconds),
            *(_colored(one.speed_over(name)) for name in others),
        )
    return table


def draw_times(path: Path, results: Sequence[Figures], subtitle: str) -> None:
    """Writes a picture: the median of each side by size, its best below, and the ratio to others.

    Args:
        path: of the picture.
        results: all figures.
        subtitle: what they were measured on.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(one.direction for one in results))
    figure = Figure(figsize=(5.6 * len(directions), 7.2), layout="constrained")
    panels = figure.subplots(
        2, len(directions), squeeze=False, sharex=True, sharey="row", height_ratios=(2, 1)
    )
    for column, direction in enumerate(directions):
        figures = [one for one in results if one.direction == direction]
        sizes = [one.size_bytes for one in figures]
        times, ratios = panels[0][column], panels[1][column]
        for color, name in zip(_COLORS, figures[0].seconds, strict=False):
            best = [one.best_s(name) * 1e3 for one in figures]
            medians = [one.median_s(name) * 1e3 for one in figures]
            times.fill_between(sizes, best, medians, color=color, alpha=0.25, linewidth=0)
            times.plot(sizes, medians, marker="o", ms=4, color=color, label=name)
            if name != next(iter(figures[0].seconds)):
                speeds = [one.speed_over(name) for one in figures]
                ratios.plot(sizes, speeds, marker="o", ms=4, color=color, label=name)
        ratios.axhline(1, color="black", linewidth=1)
        times.set_title(direction, fontsize=11)
        for axes in (times, ratios):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.grid(color="#e6e6e6", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        ratios.set_xticks(sizes, [size_name(size) for size in sizes])
        ratios.minorticks_off()
    panels[0][0].set_ylabel("milliseconds of a call; median, shaded to the best")
    panels[1][0].set_ylabel("our speed over the other's")
    panels[0][0].legend(fontsize=9, frameon=False)
    if len(results[0].seconds) > 1:
        panels[1][0].legend(fontsize=9, frameon=False)
    figure.suptitle(
        f"transport: float32 to another process of this machine\n{subtitle}", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 10**6} MB" if size_bytes >= 10**6 else f"{size_bytes // 10**3} KB"


def _colored(speed: float) -> str:
    return f"[bold {'green' if speed >= 1 else 'yellow'}]{speed:.2f}[/]"

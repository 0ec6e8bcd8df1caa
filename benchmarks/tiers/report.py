"""Storage engines as a table and a plot, from the lines that `engine_run` prints.

python -m benchmarks.tiers.report docs/pictures/tiers.png file.json RocksDB.json LMDB.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["draw", "make_table"]

_COSTS = {
    "load": "fill, in order",
    "get": "read, 1 thread",
    "threads": "read, 16 threads",
    "put": "write and sync",
}
_COLORS = ("#2a78b8", "#d1703c", "#3f9a5a")


def make_table(engines: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns a row for each engine: time and CPU time for each row, in microseconds."""
    table = Table(title="rows of 64 float32 on disk, us a row (CPU time)", title_justify="left")
    for header in ("engine", *_COSTS.values(), "read from disk a row", "disk"):
        table.add_column(header)
    for name, figures in engines.items():
        costs = [
            f"{1e6 * figures[f'{cost}_s']:.1f} ({1e6 * figures[f'{cost}_cpu_s']:.1f})"
            for cost in _COSTS
        ]
        read, disk = figures["get_read_bytes"], figures["grown_bytes"]
        table.add_row(name, *costs, f"{read:.0f} bytes", f"{disk / 1e9:.2f} GB")
    return table


def draw(path: Path, engines: Mapping[str, Mapping[str, float]]) -> None:
    """Writes a plot with the time of each cost, and a line for its CPU time."""
    from matplotlib.figure import Figure  # part of the extra `plots`

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(engines)
    for number, (name, figures) in enumerate(engines.items()):
        places = [place + (number - (len(engines) - 1) / 2) * width for place in range(len(_COSTS))]
        times = [1e6 * figures[f"{cost}_s"] for cost in _COSTS]
        cpu = [1e6 * figures[f"{cost}_cpu_s"] for cost in _COSTS]
        bars = axes.bar(places, times, width, color=_COLORS[number], label=name)
        axes.bar_label(bars, [f"{one:.3g}" for one in times], fontsize=8)
        axes.hlines(
            cpu,
            [place - width / 2 for place in places],
            [place + width / 2 for place in places],
            color="#222222",
            label=None if number else "CPU time",
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(_COSTS)), [*_COSTS.values()])
    axes.set_ylabel("us a row")
    axes.set_title("Rows of 64 float32 that are not in memory, 10 million rows", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(picture: str, *paths: str) -> None:
    engines = {
        Path(path).stem: json.loads(Path(path).read_text(encoding="utf-8")) for path in paths
    }
    Console(width=150).print(make_table(engines))
    draw(Path(picture), engines)


if __name__ == "__main__":
    main(*sys.argv[1:])

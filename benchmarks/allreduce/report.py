"""Sums between processes as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.allreduce.measuring import PEER, Cluster, Figures
from benchmarks.report import Row, make_row_of_times

__all__ = ["draw_bandwidths", "make_table", "peer_ratios", "size_name"]

_COLORS = {
    "compiler": "#2a78b8",
    "ring": "#2f9e6e",
    "hierarchical": "#8a5fb5",
    "two stages": "#c0504d",
    "to one device": "#c9a227",
    "shared memory": "#3d3d3d",
    PEER: "#d9702b",
}
# The bounds of the issues that asked for this: what AUTO may lose, and its least speed over
# PyTorch's, by the size from which it holds.
_MOST_LOSS = 0.10
_LEAST_SPEEDS = ((2**24, 2.0), (0, 1.0))


def make_table(cluster: Cluster, figures: Sequence[Figures]) -> Table:
    """Returns a row for each size: milliseconds, what AUTO took and its bandwidths."""
    table = Table(title=f"allreduce, {cluster}: milliseconds of a sum", title_justify="left")
    names = list(figures[0].times_s)
    for header in ("bytes", *names, "AUTO", "loss", "algorithm GB/s", "bus GB/s", f"/ {PEER}"):
        table.add_column(header, justify="right", no_wrap=header in ("bytes", "AUTO"))
    for one in figures:
        speed = one.speed_over_peer
        least_speed = next(least for begin, least in _LEAST_SPEEDS if one.size_bytes >= begin)
        table.add_row(
            size_name(one.size_bytes),
            *(f"{one.times_s[name] * 1e3:,.3f}" for name in names),
            one.chosen,
            _colored(f"{one.loss_of_choice:.0%}", one.loss_of_choice <= _MOST_LOSS),
            f"{one.size_bytes / one.times_s[one.chosen] / 1e9:.3f}",
            f"{one.bus_bandwidth(one.chosen, cluster.num_replicas) / 1e9:.3f}",
            "" if speed is None else _colored(f"{speed:.2f}", speed >= least_speed),
        )
    return table


def peer_ratios(results: Mapping[Cluster, Sequence[Figures]]) -> list[Row]:
    """Returns AUTO's choice beside the peer, where both were measured."""
    return [
        make_row_of_times(
            f"{size_name(one.size_bytes)}, {cluster}",
            [times[one.chosen] for times in one.rounds],
            [times[PEER] for times in one.rounds],
            PEER,
        )
        for cluster, figures in results.items()
        for one in figures
        if PEER in one.times_s
    ]


def draw_bandwidths(
    path: Path, results: Mapping[Cluster, Sequence[Figures]], subtitle: str
) -> None:
    """Writes a picture: bus bandwidth by size, a panel for each cluster, rings round AUTO's."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(results), 4.6), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (cluster, figures) in zip(panels, results.items(), strict=True):
        sizes = [one.size_bytes for one in figures]
        for name in figures[0].times_s:
            bandwidths = [one.bus_bandwidth(name, cluster.num_replicas) / 1e9 for one in figures]
            axes.plot(sizes, bandwidths, marker="o", ms=4, color=_COLORS[name], label=name)
        chosen = [one.bus_bandwidth(one.chosen, cluster.num_replicas) / 1e9 for one in figures]
        axes.plot(
            sizes, chosen, "o", ms=11, mfc="none", mec="#333333", label="AUTO's choice", zorder=5
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=45, ha="right")
        axes.set_title(str(cluster), fontsize=11)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bus bandwidth, GB/s")
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    panels[0].legend(lines.values(), lines, fontsize=9, frameon=False)
    figure.suptitle(f"allreduce: float32 summed between processes\n{subtitle}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 2**20 else f"{size_bytes >> 10} KiB"


def _colored(text: str, is_good: bool) -> str:
    return f"[bold {'green' if is_good else 'yellow'}]{text}[/]"

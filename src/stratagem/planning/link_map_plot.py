"""Picture of a map of links: the chosen method by bandwidth and latency of the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.optional_libraries import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stratagem.planning.link_map import LinkMap


_COLORS = (
    "#2a78b8",
    "#9fc5e0",
    "#3a9a5b",
    "#e3c53b",
    "#e8862e",
    "#c9a6dd",
    "#8a5bb8",
    "#c8372d",
    "#7f7f7f",
)
_SIZE_IN = (8.5, 5.0)
_SPEEDUPS = (1.5, 3.0, 10.0, 30.0, 100.0, 300.0)
_RATES = (
    (125e3, "1 Mbit/s"),
    (1.25e6, "10 Mbit/s"),
    (1.25e7, "100 Mbit/s"),
    (1.25e8, "1 Gbit/s"),
    (1.25e9, "10 Gbit/s"),
    (1.25e10, "100 Gbit/s"),
    (5e10, "400 Gbit/s"),
)
_TIMES = ((1e-5, "10 us"), (1e-4, "100 us"), (1e-3, "1 ms"), (1e-2, "10 ms"), (1e-1, "100 ms"))


def draw_link_map(found: LinkMap, path: str | Path) -> None:
    """Writes the picture to a file, in the format of its extension."""
    path = Path(path)
    figure = link_map_figure(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def link_map_figure(found: LinkMap) -> Figure:
    """Returns a matplotlib figure; ImportError without matplotlib."""
    by, install = "Drawing a map of links", "'stratagem[plots]'"
    figure = load("matplotlib.figure", needed_by=by, install=install).Figure(
        figsize=_SIZE_IN, layout="constrained"
    )
    colors = load("matplotlib.colors", needed_by=by, install=install)
    patches = load("matplotlib.patches", needed_by=by, install=install)
    axes = figure.subplots()
    choices = found.choices
    axes.pcolormesh(
        found.bandwidths_bytes_per_s,
        found.latencies_s,
        choices,
        cmap=colors.ListedColormap(_COLORS),
        vmin=-0.5,
        vmax=len(_COLORS) - 0.5,
        shading="nearest",
    )
    _draw_gains(axes, found)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _name_ticks(axes, found)
    axes.set_xlabel("bandwidth of the network between hosts, per device")
    axes.set_ylabel("latency of the network")
    axes.legend(
        handles=[
            patches.Patch(color=_COLORS[place % len(_COLORS)], label=method.name)
            for place, method in enumerate(found.methods)
            if place in choices
        ],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=9,
    )
    axes.set_title(
        f"{found.target.name}: the mildest method within {found.tolerance:.0%} of the fastest\n"
        "Lines: times faster than lockstep. Predicted, not measured.",
        fontsize=10,
        loc="left",
    )
    return figure


def _draw_gains(axes: Any, found: LinkMap) -> None:
    gains = found.step_s[0] / np.take_along_axis(found.step_s, found.choices[None], axis=0)[0]
    levels = [one for one in _SPEEDUPS if gains.min() < one < gains.max()]
    if min(gains.shape) < 2 or not levels:
        return
    lines = axes.contour(
        found.bandwidths_bytes_per_s,
        found.latencies_s,
        gains,
        levels=levels,
        colors="black",
        linewidths=0.8,
    )
    labels = axes.clabel(lines, inline=False, fmt=lambda level: f"{level:g}x", fontsize=8)
    for label in labels:
        label.set_color("black")
        label.set_rotation(0)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})


def _name_ticks(axes: Any, found: LinkMap) -> None:
    for axis, names, values in (
        (axes.xaxis, _RATES, found.bandwidths_bytes_per_s),
        (axes.yaxis, _TIMES, found.latencies_s),
    ):
        least, most = min(values) / 1.001, max(values) * 1.001
        shown = [(place, name) for place, name in names if least <= place <= most]
        axis.set_ticks([place for place, _ in shown], [name for _, name in shown], fontsize=8)
        axis.set_ticks([], minor=True)

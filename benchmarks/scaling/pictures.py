"""The efficiencies as bars, and the predicted ones as ranges over the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_efficiencies", "draw_predictions"]

_COLORS = ("#2a78b8", "#9a9a9a", "#d9702b", "#3a9a5b", "#8a5bb8")
_ROW_HEIGHT_IN = 0.34
_WIDTH_IN = 10


def draw_efficiencies(
    path: Path, benchmark: str, rows: Sequence[Mapping[str, Any]], subtitle: str
) -> None:
    """Writes a picture: a bar for each efficiency, its range over the rounds, and what was wanted.

    Args:
        path: of the picture.
        benchmark: its name.
        rows: those of the results.
        subtitle: what they were measured on.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["metric"] == "efficiency"]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    height = 1.6 + _ROW_HEIGHT_IN * len(rows)
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots()
    longest = max([1.0, *(row["ratio_max"] for row in rows)])
    for place, row in enumerate(rows):
        color = _COLORS[sides.index(row["side"]) % len(_COLORS)]
        axes.barh(place, row["ratio"], height=0.68, color=color)
        axes.plot([row["ratio_min"], row["ratio_max"]], [place] * 2, color="#333333", lw=1.2)
        if "wanted" in row:
            axes.plot([row["wanted"]] * 2, [place - 0.42, place + 0.42], color="black", lw=2.5)
        axes.text(
            max(row["ratio"], row["ratio_max"], 1.0) + 0.012 * longest,
            place,
            f"{row['ratio']:.3f}",
            va="center",
            fontsize=9,
            fontweight="bold",
        )
    labels = [f"{row['case']}  |  {row['side']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * longest)
    axes.axvline(1, color="#666666", linewidth=1)
    axes.set_xlabel(
        "steps/s of two workers over those of one, the batch of each the same (black: wanted)"
    )
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{benchmark}: two workers, each on a core of its own\n{subtitle}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_predictions(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a picture: the range of predicted efficiencies of each workload over the GPUs.

    Args:
        path: of the picture.
        rows: those of the prediction.
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(_WIDTH_IN, 3.4), layout="constrained")
    panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    for axes, workload, color in zip(panels, workloads, _COLORS, strict=False):
        own = [row for row in rows if row["workload"] == workload]
        places = range(len(own) + 1)
        lowest = [1.0, *(row["lowest_efficiency"] for row in own)]
        highest = [1.0, *(row["highest_efficiency"] for row in own)]
        axes.fill_between(places, lowest, highest, color=color, alpha=0.25, linewidth=0)
        axes.plot(places, lowest, color=color, marker="o", markersize=4)
        axes.plot(places, highest, color=color, marker="o", markersize=4, linestyle="--")
        axes.set_xticks(places, ["1", *(str(row["num_gpus"]) for row in own)])
        axes.set_title(f"{workload}\n{own[0]['batch_size']} a GPU", fontsize=9)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("GPUs", fontsize=9)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency", fontsize=9)
    figure.suptitle(
        "scaling: predicted for H100 in hosts of 8 from compiled programs, nothing of it measured\n"
        "line: shortest computing, nothing hidden behind it; dashed: longest, all of it hidden",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

"""The efficiencies as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_efficiencies"]

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

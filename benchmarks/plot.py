"""The ratios of a benchmark as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_ratios"]

_FASTER, _SLOWER = "#2a78b8", "#d9702b"
_ROW_HEIGHT_IN = 0.34
_WIDTH_IN = 10


def draw_ratios(
    path: Path, benchmark: str, rows: Sequence[Mapping[str, Any]], subtitle: str
) -> None:
    """Writes a picture: a bar for each row, its range over the rounds, and a line at 1.

    Args:
        path: of the picture.
        benchmark: its name.
        rows: those of the results.
        subtitle: what they were measured on.
    """
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    height = 1.5 + _ROW_HEIGHT_IN * len(rows)
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots()
    ratios = [row["ratio"] for row in rows]
    longest = max([1.0, *(row["ratio_max"] for row in rows)])
    for place, row in enumerate(rows):
        ratio = row["ratio"]
        axes.barh(place, ratio, height=0.68, color=_FASTER if ratio >= 1 else _SLOWER)
        axes.plot([row["ratio_min"], row["ratio_max"]], [place] * 2, color="#333333", lw=1.2)
        # Beyond the range, on white, so that nothing crosses the figure.
        axes.text(
            max(ratio, row["ratio_max"], 1.0) + 0.012 * longest,
            place,
            f"{ratio:.2f}\u00d7" if ratio >= 2 else f"{ratio:.3f}\u00d7",
            va="center",
            fontsize=9,
            fontweight="bold",
        )
    axes.axvline(1, color="black", linewidth=1)
    labels = [f"{row['case']}  |  {row['reference_name']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * longest)
    axes.set_xlabel("our speed over the reference's (median and range of the rounds)")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    below = sum(ratio < 1 for ratio in ratios)
    figure.suptitle(
        f"{benchmark}: {len(rows) - below} of {len(rows)} at least as fast as the reference\n"
        f"{subtitle}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

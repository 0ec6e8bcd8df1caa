"""Share of busy time against the number of input workers, a panel for each work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_busy"]

_COLORS = {"Stratagem": "#2a78b8", "tf.data service": "#d9702b", "Ray Data": "#5a9a4a"}
_MARKS = {"Stratagem": "o", "tf.data service": "s", "Ray Data": "^"}
_PANEL_IN, _HEIGHT_IN = 3.8, 4.2


def draw_busy(path: Path, rows: Sequence[Mapping[str, Any]], subtitle: str) -> None:
    """Writes a picture: a line for each side, with the range of the rounds.

    Args:
        path: of the picture.
        rows: those of the results.
        subtitle: what they were measured on.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    titles = list(dict.fromkeys(row["title"] for row in rows))
    figure = Figure(figsize=(_PANEL_IN * len(titles), _HEIGHT_IN), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles, strict=True):
        here = [row for row in rows if row["title"] == title]
        counts = sorted({row["num_workers"] for row in here})
        for name, points in _lines(here).items():
            places = [counts.index(count) for count in sorted(points)]
            rounds = [points[count] for count in sorted(points)]
            middle = [statistics.median(one) for one in rounds]
            low = [mid - min(one) for mid, one in zip(middle, rounds, strict=True)]
            high = [max(one) - mid for mid, one in zip(middle, rounds, strict=True)]
            axes.errorbar(
                places,
                middle,
                yerr=[low, high],
                color=_COLORS.get(name),
                marker=_MARKS.get(name),
                capsize=3,
                label=name,
            )
        axes.set_title(f"{title}\nstep of {1e3 * here[0]['step_s']:.0f} ms", fontsize=10)
        axes.set_xticks(range(len(counts)), [str(count) if count else "none" for count in counts])
        axes.set_xlabel("input workers")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("time in which the device is busy")
    figure.axes[0].legend(frameon=False, loc="upper left", fontsize=9)
    figure.suptitle(subtitle, fontsize=9, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Sequence[float]]]:
    """Returns the shares of the rounds by side and number of workers."""
    lines: dict[str, dict[int, Sequence[float]]] = {"Stratagem": {}}
    for row in rows:
        lines["Stratagem"][row["num_workers"]] = row["ours_rounds"]
        found = lines.setdefault(row["reference_name"], {})
        found[row["num_workers"]] = row["reference_rounds"]
    return lines

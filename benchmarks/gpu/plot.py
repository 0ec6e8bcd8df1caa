"""The speeds of all sides as bars, a panel for each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import MODELS

__all__ = ["draw_speeds"]

_OURS, _PEERS = "#2a78b8", "#b9b9b9"
_ROW_HEIGHT_IN, _PANEL_HEIGHT_IN, _WIDTH_IN = 0.3, 0.9, 10


def draw_speeds(
    path: Path, speeds: Mapping[str, Sequence[Mapping[str, Any]]], titles: Mapping[str, str]
) -> None:
    """Writes a picture of the rows of `speed_rows`, with the range of the rounds.

    Args:
        path: of the picture.
        speeds: rows by workload.
        titles: of workloads.
    """
    if not speeds:
        return
    from matplotlib.figure import Figure

    counts = [len(rows) for rows in speeds.values()]
    height = _ROW_HEIGHT_IN * sum(counts) + _PANEL_HEIGHT_IN * len(counts) + 0.4
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=[n + 1 for n in counts])
    for axes, (workload, rows) in zip(panels[:, 0], speeds.items(), strict=True):
        _draw_panel(axes, rows, f"{titles[workload]}: {MODELS[workload].unit}/s")
    kinds = sorted({row["device_kind"] for rows in speeds.values() for row in rows})
    figure.suptitle(f"{', '.join(kinds)}: median and range of the rounds", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_panel(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    ordered = sorted(rows, key=lambda row: -row["median"])
    longest = max(max(row["speeds"]) for row in ordered)
    for place, row in enumerate(ordered):
        axes.barh(place, row["median"], height=0.7, color=_OURS if row["is_ours"] else _PEERS)
        axes.plot([min(row["speeds"]), max(row["speeds"])], [place] * 2, color="#333333", lw=1.3)
        label = f"{row['median']:,.0f}"
        if row["mfu"] is not None:
            label += f"  ({row['mfu']:.0%} of peak)"
        axes.text(max(row["speeds"]) + 0.01 * longest, place, label, va="center", fontsize=8)
    names = [f"ours: {row['name']}" if row["is_ours"] else row["name"] for row in ordered]
    axes.set_yticks(range(len(ordered)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * longest)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)

"""Stalls of training, restores and memory as tables, and the stalls as a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.report import Row, make_row_of_times

__all__ = ["Figures", "draw_stalls", "make_restore_table", "make_table", "peer_ratios"]

# The bound of the issue that asked for this: so long, or so much of a save that training waits for.
_MOST_STALL_S, _MOST_SHARE = 0.2, 0.02
_LEAST_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a side; seconds by name, as `checkpoint_rounds` tells them.

    Args:
        name: of the side.
        now: medians of saves that training waits for.
        behind: medians of saves behind training.
        first_now: of the first save that training waits for, with the peaks of memory.
        first_behind: of the first of these, whose memory is fresh.
        rounds_now: of each save that training waits for.
        rounds_behind: of each save behind training.
    """

    name: str
    now: dict[str, float]
    behind: dict[str, float]
    first_now: dict[str, float]
    first_behind: dict[str, float]
    rounds_now: Sequence[dict[str, float]] = ()
    rounds_behind: Sequence[dict[str, float]] = ()

    @property
    def bound_s(self) -> float:
        """What the stall of a save behind training may be."""
        return max(_MOST_STALL_S, _MOST_SHARE * self.now["blocked"])


def peer_ratios(results: Sequence[Figures]) -> list[Row]:
    """Returns our saves and restores beside those of the others."""
    ours, *others = results

    def row(title: str, other: Figures, rounds: str, key: str) -> Row:
        own, peer = ([one[key] for one in getattr(side, rounds)] for side in (ours, other))
        return make_row_of_times(title, own, peer, other.name)

    return [
        row(title, other, rounds, key)
        for other in others
        for title, rounds, key in (
            ("save, waited for", "rounds_now", "blocked"),
            ("stall of a save behind training", "rounds_behind", "stall"),
            ("restore", "rounds_now", "restore"),
        )
    ]


def _empty_table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left")
    for header in headers:
        is_name = header == "side"
        table.add_column(header, justify="left" if is_name else "right", no_wrap=is_name)
    return table


def make_table(size_bytes: int, results: Sequence[Figures]) -> Table:
    """Returns a row for each side."""
    title = f"checkpoint: seconds for a state of {size_bytes / 1e9:g} GB on CPU"
    table = _empty_table(
        title,
        "side",
        "a step",
        "save, waited for",
        "behind: stall",
        "bound",
        "first stall",
        "later steps",
        "until written",
        "stall / ours",
    )
    own_s = results[0].behind["stall"]
    for one in results:
        color = "green" if one.behind["stall"] <= one.bound_s else "yellow"
        table.add_row(
            one.name,
            f"{one.behind['step']:.3f}",
            f"{one.now['blocked']:.2f}",
            f"[bold {color}]{one.behind['stall']:.3f}[/]",
            f"{one.bound_s:.2f}",
            f"{one.first_behind['stall']:.2f}",
            f"{one.behind['behind']:+.2f}",
            f"{one.behind['whole']:.2f}",
            f"{one.behind['stall'] / own_s:.2f}",
        )
    return table


def make_restore_table(size_bytes: int, results: Sequence[Figures]) -> Table:
    """Returns a row for each side: its restores beside the disk, and its memory."""
    title = (
        f"checkpoint: restores without page cache, and the most memory, of {size_bytes / 1e9:g} GB"
    )
    table = _empty_table(
        title,
        "side",
        "restore: s",
        "disk alone: s",
        "bandwidth / disk",
        "memory / state: save, waited for",
        "save behind",
        "restore",
    )
    for one in results:
        color = "green" if one.now["share"] >= _LEAST_SHARE else "yellow"
        table.add_row(
            one.name,
            f"{one.now['restore']:.2f}",
            f"{one.now['disk']:.2f}",
            f"[bold {color}]{one.now['share']:.2f}[/]",
            f"{one.first_now['save_peak']:.2f}",
            f"{one.first_behind['save_peak']:.2f}",
            f"{one.first_now['restore_peak']:.2f}",
        )
    return table


def draw_stalls(path: Path, size_bytes: int, results: Sequence[Figures], subtitle: str) -> None:
    """Writes a picture: for each side how long training waits, with the bound."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.9 * len(results)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(results):
        bars = {
            "save, waited for": (one.now["blocked"], "#c4ccd4", 0.3),
            "behind training: first": (one.first_behind["stall"], "#9cc3e0", 0.0),
            "behind training: stall": (one.behind["stall"], "#2a78b8", -0.3),
        }
        for label, (value_s, color, shift) in bars.items():
            y = place - shift
            axes.barh(y, value_s, 0.28, color=color, label=label if place == 0 else None)
            axes.text(value_s, y, f" {value_s:.2f} s", va="center", fontsize=8, color="#444444")
    axes.axvline(
        results[0].bound_s, color="#d9702b", linewidth=1.2, linestyle="--", label="bound of ours"
    )
    axes.set_yticks(range(len(results)), [one.name for one in results])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds that training waits")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(
        f"checkpoint: how long training waits for a save of {size_bytes / 1e9:g} GB\n{subtitle}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

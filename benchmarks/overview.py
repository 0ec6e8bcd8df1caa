"""One picture of all ratios to peers and to loops by hand: `python -m benchmarks.overview`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.compare.intervals import Interval, bootstrap
from benchmarks.runner import paired_ratios

__all__ = ["Ratio", "draw_overview", "main", "read_ratios"]

_AHEAD, _LEVEL, _BEHIND = "#2a78b8", "#8a8a8a", "#d9702b"
_ROW_HEIGHT_IN = 0.19
_WIDTH_IN = 10


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Our speed over that of a reference.

    Args:
        benchmark: its name.
        case: what was done.
        reference: by whom.
        interval: of the median of the rounds.
    """

    benchmark: str
    case: str
    reference: str
    interval: Interval

    @property
    def color(self) -> str:
        """Color of the verdict: ahead, behind, or neither."""
        interval = self.interval
        return _AHEAD if interval.low >= 1 else _BEHIND if interval.high < 1 else _LEVEL


def read_ratios(folder: Path) -> list[Ratio]:
    """Returns the ratios in all results of a folder, the largest first."""
    ratios = [
        _ratio_of(path.stem, row)
        for path in sorted(folder.glob("*.json"))
        for row in _rows_of(json.loads(path.read_text(encoding="utf-8")))
        if row.get("ours_rounds") and row.get("reference_rounds") and row.get("has_peer", True)
    ]
    return sorted(ratios, key=lambda one: one.interval.ratio, reverse=True)


def _rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows with ratios, which some benchmarks keep apart from their own."""
    return [*results.get("rows", []), *results.get("ratios", [])]


def _ratio_of(benchmark: str, row: dict[str, Any]) -> Ratio:
    interval = bootstrap([paired_ratios(row["ours_rounds"], row["reference_rounds"])])
    return Ratio(benchmark, row["case"], row["reference_name"], interval)


def draw_overview(path: Path, ratios: Sequence[Ratio]) -> None:
    """Writes a picture with a point and an interval for each ratio, on one logarithmic axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(_WIDTH_IN, 1.4 + _ROW_HEIGHT_IN * len(ratios)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    for place, one in enumerate(ratios):
        interval, color = one.interval, one.color
        axes.plot([interval.low, interval.high], [place] * 2, color=color, linewidth=2.2)
        axes.plot(interval.ratio, place, "o", color=color, markersize=4)
    axes.axvline(1, color="black", linewidth=1)
    labels = [f"{one.benchmark}: {one.case}  |  {one.reference}" for one in ratios]
    axes.set_yticks(range(len(ratios)), labels, fontsize=7)
    axes.set_ylim(len(ratios) - 0.4, -0.6)
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ends = [0.5, 2.0, *(end for one in ratios for end in (one.interval.low, one.interval.high))]
    axes.set_xlim(0.92 * min(ends), 1.08 * max(ends))
    axes.set_xlabel("our speed over the reference's: median and 95 % interval")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    colors = [one.color for one in ratios]
    figure.suptitle(
        f"{len(ratios)} ratios: {colors.count(_AHEAD)} ahead, {colors.count(_LEVEL)} level, "
        f"{colors.count(_BEHIND)} behind",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


@click.command()
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("runs", "bench"),
    help="Folder with the results of `make bench`.",
)
@click.option("--picture", type=click.Path(path_type=Path), help="overview.png there if not given.")
def main(results: Path, picture: Path | None) -> None:
    """Draws all ratios of the last results of each benchmark."""
    ratios = read_ratios(results)
    if not ratios:
        raise click.ClickException(f"No results with ratios in {results}: run `make bench`.")
    path = picture or results / "overview.png"
    draw_overview(path, ratios)
    click.echo(f"{len(ratios)} ratios: {path}")


if __name__ == "__main__":
    main()

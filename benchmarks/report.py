"""What was found, as rows, as a table, as a file and as a picture.

`python -m benchmarks.report` draws all ratios of the last results of each benchmark.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

Row = dict[str, Any]

_NUM_RESAMPLES = 5000
_CONFIDENCE = 0.95
_AHEAD, _LEVEL, _BEHIND = "#2a78b8", "#8a8a8a", "#d9702b"


class Verdict(Enum):
    """Result of a comparison with a bound."""

    HELD = "held"
    BROKEN = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """Median ratio of speeds, above 1 where we are faster, and its interval at 95 % confidence."""

    ratio: float
    low: float
    high: float

    def verdict(self, bound: float) -> Verdict:
        """Returns HELD if at most a part `bound` slower, BROKEN if more, else UNDECIDED."""
        if self.low >= 1 - bound:
            return Verdict.HELD
        return Verdict.BROKEN if self.high < 1 - bound else Verdict.UNDECIDED

    @property
    def color(self) -> str:
        return _AHEAD if self.low >= 1 else _BEHIND if self.high < 1 else _LEVEL


def bootstrap(starts: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Returns the median of ratios with its interval.

    Resamples starts first, then rounds within each: rounds of one start share the luck of its
    processes, such as the pages that hold their arrays."""
    generator = np.random.default_rng(seed)
    sizes = np.array([len(rounds) for rounds in starts])
    ratios = np.full((len(starts), sizes.max()), np.nan)
    for start, rounds in enumerate(starts):
        ratios[start, : len(rounds)] = rounds
    # Axes: resamples, their starts, rounds of these; starts with fewer rounds end with NaN.
    chosen = generator.integers(len(starts), size=(_NUM_RESAMPLES, len(starts), 1))
    places = (generator.random((*chosen.shape[:2], sizes.max())) * sizes[chosen]).astype(int)
    samples = ratios[chosen, places]
    samples[np.arange(sizes.max()) >= sizes[chosen]] = np.nan
    # Sorted, NaN comes last. NumPy's own nanmedian of short rows is many times slower.
    rows = np.sort(samples.reshape(_NUM_RESAMPLES, -1))
    num_ratios = np.count_nonzero(~np.isnan(rows), axis=1)
    middle = np.stack([(num_ratios - 1) // 2, num_ratios // 2], axis=1)
    medians = np.take_along_axis(rows, middle, axis=1).mean(axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Interval(float(np.nanmedian(ratios)), float(low), float(high))


def paired_ratios(ours: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns our speed over the reference's, round by round: above 1 we are faster."""
    return [mine / theirs for mine, theirs in zip(ours, reference, strict=True)]


def make_row(
    case: str,
    ours: Sequence[float],
    reference: Sequence[float],
    reference_name: str,
    unit: str = "steps/s",
) -> Row:
    """Returns a row from the speeds of both in each round, as far as both went.

    The ratio is the median of those of the rounds: the sides of a round ran one after the other,
    under the same load.
    """
    count = min(len(ours), len(reference))
    ours, reference = list(ours[:count]), list(reference[:count])
    ratios = paired_ratios(ours, reference)
    return {
        "case": case,
        "unit": unit,
        "ours": statistics.median(ours),
        "reference": statistics.median(reference),
        "reference_name": reference_name,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_rounds": ours,
        "reference_rounds": reference,
    }


def make_row_of_times(
    case: str, ours_s: Sequence[float], reference_s: Sequence[float], reference_name: str
) -> Row:
    """Returns a row from the seconds of both in each round."""
    ours, reference = ([1 / one for one in seconds] for seconds in (ours_s, reference_s))
    return make_row(case, ours, reference, reference_name, "1/s")


def make_table(benchmark: str, rows: Sequence[Row]) -> Table:
    """Returns a table of the rows: ratios are above 1, and green, where ours is better."""
    table = Table(title=f"{benchmark}: medians of the rounds", title_justify="left")
    for header in ("case", "reference"):
        table.add_column(header)
    for header in ("unit", "ours", "reference", "ratio", "min", "max", "wanted"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("ours, reference")
    previous = None
    for row in rows:
        wanted = row.get("wanted")
        color = "green" if row["ratio"] >= (wanted or 1) else "yellow"
        table.add_row(
            row["case"] if row["case"] != previous else "",
            row["reference_name"],
            row["unit"],
            *(f"{row[side]:,.4g}" for side in ("ours", "reference")),
            f"[bold {color}]{row['ratio']:.3f}[/]",
            *(f"{row[end]:.3f}" for end in ("ratio_min", "ratio_max")),
            "" if wanted is None else f"{wanted:.2f}",
            "; ".join(
                f"{name} " + ", ".join(_text(one) for one in pair if one is not None)
                for name, pair in row.get("details", {}).items()
            ),
        )
        previous = row["case"]
    return table


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.3g}"


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def read_ratios(path: Path) -> list[Row]:
    """Returns the rows with ratios to peers of a folder's results, or of several in one file.

    Each has its benchmark and its interval; the largest ratio comes first.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    told = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    if not path.is_dir():
        told = told[path.stem]
    rows = [
        {**row, "benchmark": name, "interval": interval_of(row)}
        for name, results in told.items()
        for row in results.get("rows", [])
        if row.get("ours_rounds") and row.get("has_peer", True)
    ]
    return sorted(rows, key=lambda row: row["interval"].ratio, reverse=True)


def interval_of(row: Row) -> Interval:
    return bootstrap([paired_ratios(row["ours_rounds"], row["reference_rounds"])])


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Writes a picture with a point and an interval for each ratio, on one logarithmic axis."""
    # The tests of the oldest versions load this module without Matplotlib.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(10, 1.4 + 0.19 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    intervals: list[Interval] = [row.get("interval") or interval_of(row) for row in rows]
    for place, one in enumerate(intervals):
        axes.plot([one.low, one.high], [place] * 2, color=one.color, linewidth=2.2)
        axes.plot(one.ratio, place, "o", color=one.color, markersize=4)
    axes.axvline(1, color="black", linewidth=1)
    labels = [f"{row['case']}  |  {row['reference_name']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ends = [0.5, 2.0, *(end for one in intervals for end in (one.low, one.high))]
    axes.set_xlim(0.92 * min(ends), 1.08 * max(ends))
    axes.set_xlabel("our speed over the reference's: median and 95 % interval")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    colors = [one.color for one in intervals]
    counted = (
        f"{colors.count(_AHEAD)} ahead, {colors.count(_LEVEL)} level, "
        f"{colors.count(_BEHIND)} behind"
    )
    figure.suptitle(f"{title}: {len(rows)} ratios, {counted}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_together(path: Path, results: Path) -> int:
    """Draws the ratios of all results in one picture; returns their number."""
    rows = [{**row, "case": f"{row['benchmark']}: {row['case']}"} for row in read_ratios(results)]
    if rows:
        draw(path, rows, "all")
    return len(rows)


def describe_machine() -> dict[str, Any]:
    """Returns what the figures are measured on."""
    cpu = platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():  # Linux says it here alone
        lines = path.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    told = {"python": platform.python_version(), "platform": platform.platform()}
    return {"cpu": cpu, "cores": os.cpu_count(), "load": os.getloadavg()[0], **told}


def busy_cores(duration_s: float) -> float:
    """Returns the cores that all programs together used on average while this one slept.

    Where Linux's `/proc/stat` is missing, returns the load average.
    """
    if not (path := Path("/proc/stat")).exists():
        return os.getloadavg()[0]

    def busy_s() -> float:
        words = path.read_text(encoding="utf-8").split("\n", 1)[0].split()
        user, nice, system, _, _, *others = map(int, words[1:9])
        return sum((user, nice, system, *others)) / os.sysconf("SC_CLK_TCK")

    before_s = busy_s()
    time.sleep(duration_s)
    return (busy_s() - before_s) / duration_s


@click.command()
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True),
    default=Path("runs", "bench"),
    help="Folder with the results of `make bench`, or a file with several.",
)
@click.option("--picture", type=click.Path(path_type=Path), help="overview.png there if not given.")
def main(results: Path, picture: Path | None) -> None:
    """Draws all ratios of the last results of each benchmark."""
    path = picture or results / "overview.png"
    count = draw_together(path, results)
    if not count:
        raise click.ClickException(f"No results with ratios in {results}: run `make bench`.")
    click.echo(f"{count} ratios: {path}")


if __name__ == "__main__":
    main()

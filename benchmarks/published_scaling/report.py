"""Published and predicted scaling as a table and as a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

__all__ = ["MOST_APART", "ScaledRow", "draw_scaling", "make_table", "summary"]

# The bound for rows whose published configuration is complete.
MOST_APART = 0.15
_COLORS = ("#2a78b8", "#d9702b", "#3a9a5b", "#8a5bb8", "#8a949e")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledRow:
    """A published throughput beside the predicted one.

    Args:
        group: title of the group.
        model: name of the model.
        hardware: devices that it was measured on.
        unit: unit of throughput.
        is_complete: True if the publication states all that a prediction needs.
        devices: number of devices.
        batch: examples per device and pass.
        passes: passes per update.
        published: published throughput.
        predicted: predicted throughput.
        published_scaling: published throughput, divided by that of the group's smallest row.
        predicted_scaling: predicted throughput, likewise.
        device_ratio: number of devices, likewise.
    """

    group: str
    model: str
    hardware: str
    unit: str
    is_complete: bool
    devices: int
    batch: int
    passes: int
    published: float
    predicted: float
    published_scaling: float
    predicted_scaling: float
    device_ratio: float

    @property
    def is_smallest(self) -> bool:
        """True for the row that the others of its group are compared with."""
        return self.device_ratio == 1

    @property
    def error(self) -> float:
        """Relative error of the predicted scaling."""
        return self.predicted_scaling / self.published_scaling - 1

    @property
    def linear_error(self) -> float:
        """Relative error of a prediction that throughput is proportional to devices."""
        return self.device_ratio / self.published_scaling - 1

    @property
    def throughput_error(self) -> float:
        """Relative error of the predicted throughput."""
        return self.predicted / self.published - 1


def make_table(rows: Sequence[ScaledRow], compilers: str) -> Table:
    """Returns a row for each published throughput.

    Args:
        rows: by group.
        compilers: compilers of the programs.
    """
    title = f"published_scaling: predicted from programs compiled for {compilers}, nothing measured"
    table = Table(title=title, title_justify="left")
    table.add_column("published")
    for header in ("devices", "batch", "throughput", "scaling", "predicted", "error", "throughput"):
        table.add_column(header, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        is_first = row.group != previous
        if is_first and previous is not None:
            table.add_section()
        previous = row.group
        table.add_row(
            f"{row.model}, {row.hardware}: {row.group}{'' if row.is_complete else ' (incomplete)'}"
            if is_first
            else "",
            f"{row.devices:,}",
            f"{row.batch} x {row.passes}" if row.passes > 1 else str(row.batch),
            f"{row.published:,.0f} {row.unit}" if is_first else f"{row.published:,.0f}",
            f"{row.published_scaling:.2f}",
            f"{row.predicted_scaling:.2f}",
            "" if row.is_smallest else f"[{_color(row)}]{row.error:+.1%}[/]",
            f"{row.throughput_error:+.0%}",
        )
    return table


def _color(row: ScaledRow) -> str:
    if not row.is_complete:
        return "dim"
    return "green" if abs(row.error) <= MOST_APART else "yellow"


def summary(rows: Sequence[ScaledRow]) -> str:
    """Returns one line: how many predictions are within the bound, and how many linear ones."""
    parts: list[str] = []
    for name, is_complete in (("complete", True), ("incomplete", False)):
        own = [row for row in rows if row.is_complete == is_complete and not row.is_smallest]
        near, linear = (
            sum(abs(error) <= MOST_APART for error in errors)
            for errors in ([row.error for row in own], [row.linear_error for row in own])
        )
        parts.append(
            f"{near} of {len(own)} rows whose configuration is {name} "
            f"(linear scaling: {linear} of {len(own)})"
        )
    return f"Within {MOST_APART:.0%} of the published scaling: {', '.join(parts)}."


def draw_scaling(path: Path, rows: Sequence[ScaledRow]) -> None:
    """Writes a picture: throughput per device by number of devices, one panel per model."""
    # The tests of the oldest versions load this module without the extra `plots`.
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(4.6 * len(models), 5.2), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        groups = list(dict.fromkeys(row.group for row in rows if row.model == model))
        for group, color in zip(groups, _COLORS, strict=False):
            own = [row for row in rows if row.group == group]
            devices = [row.devices for row in own]
            published = [row.published_scaling / row.device_ratio for row in own]
            predicted = [row.predicted_scaling / row.device_ratio for row in own]
            face = color if own[0].is_complete else "white"
            label = group if own[0].is_complete else f"{group} (incomplete)"
            axes.plot(devices, predicted, color=color, linewidth=1.6)
            axes.scatter(
                devices, published, s=32, color=color, facecolors=face, label=label, zorder=3
            )
        axes.set_xscale("log", base=2)
        ticks = [2**power for power in range(0, 13, 3)]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlim(0.8, 6000)
        axes.set_ylim(0, 1.1)
        axes.set_title(model, fontsize=11)
        axes.set_xlabel("devices")
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.14))
    panels[0].set_ylabel("throughput per device, of the smallest row's")
    figure.suptitle(
        "Published (points) and predicted by sg.plan (lines). In MLPerf, the batch per device "
        "shrinks; elsewhere it stays.",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

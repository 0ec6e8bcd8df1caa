"""Plot of a plan with matplotlib: memory of a device, and step time by number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.optional_libraries import load
from stratagem.planning.report import headline, time_text, verdict
from stratagem.planning.result import Plan
from stratagem.rendering import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLORS = {
    "parameters": "#2a78b8",
    "optimizer": "#8a5bb8",
    "other state": "#e3c53b",
    "batch": "#3a9a5b",
    "next batch": "#9fd0ae",
    "activations and gradients": "#e8862e",
    "program": "#7f7f7f",
}
_WIDTH_IN = 10
_HEIGHT_IN = 5.2
# Smaller parts would only lengthen the legend.
_LEAST_NAMED_SHARE = 0.01


def draw(plan: Plan, path: str | Path) -> None:
    """Writes the plot to a file, in the format of its extension; ImportError without matplotlib."""
    path = Path(path)
    figure = figure_of(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def figure_of(plan: Plan) -> Figure:
    """Returns a matplotlib figure: device memory against its limits, and step times below it."""
    figure_module = load(
        "matplotlib.figure", needed_by="Plotting a plan", install="'stratagem[plots]'"
    )
    figure = figure_module.Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    memory, steps = figure.subplots(2, 1, height_ratios=(1, 1.7))
    _draw_memory(memory, plan)
    _draw_steps(steps, plan)
    figure.suptitle(
        f"{headline(plan)}, compiled for {plan.compiler.upper()}\n{verdict(plan)}",
        fontsize=11,
    )
    return figure


def _draw_memory(axes: Axes, plan: Plan) -> None:
    memory = plan.memory
    gib = 2**30
    whole = max(memory.total_bytes, memory.device_bytes) / gib
    left = 0.0
    for name, size in memory.parts():
        width = size / gib
        if size:
            label = f"{name} {size_text(size)}"
            shown = label if size >= _LEAST_NAMED_SHARE * memory.total_bytes else None
            axes.barh(0, width, left=left, height=0.6, color=_COLORS[name], label=shown)
        left += width
    limits = (("JAX's pool", memory.pool_bytes), ("device", memory.device_bytes))
    for name, size in limits:
        axes.axvline(size / gib, color="#c8372d", linewidth=1.5, linestyle="--")
        axes.text(size / gib, 0.42, f" {name}", color="#c8372d", fontsize=9, va="bottom")
    axes.set_xlim(0, 1.1 * whole)
    axes.set_ylim(-0.45, 0.75)
    axes.set_yticks([])
    axes.set_xlabel("device memory at the peak of a step, GiB")
    axes.spines[["top", "right", "left"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(ncols=3, fontsize=9, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))


def _draw_steps(axes: Axes, plan: Plan) -> None:
    times = plan.scaling
    indices = range(len(times))
    unit_s, unit = (1.0, "s") if plan.step.step_s >= 1 else (1e-3, "ms")
    compute = [(time.compute_s + time.launch_s) / unit_s for time in times]
    exposed = [(time.reduction_s - time.hidden_s) / unit_s for time in times]
    axes.bar(indices, compute, width=0.6, color="#3a9a5b", label="compute and launch")
    axes.bar(
        indices, exposed, bottom=compute, width=0.6, color="#c8372d", label="exposed communication"
    )
    highest = max(time.step_s for time in times) / unit_s
    axes.plot(
        indices,
        [time.shortest_s / unit_s for time in times],
        "_",
        color="black",
        markersize=26,
        markeredgewidth=1.5,
        label="best case: full overlap",
    )
    for index, time in enumerate(times):
        text = f"{time_text(time.step_s)}\n{time.efficiency:.0%}"
        axes.text(
            index, time.step_s / unit_s + 0.03 * highest, text, ha="center", va="bottom", fontsize=9
        )
    axes.set_xticks(indices, [str(time.num_devices) for time in times])
    axes.set_ylim(0, 1.45 * highest)
    axes.set_xlabel("devices, with the same batch per device; percent: efficiency")
    axes.set_ylabel(f"predicted step time, {unit}")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, fontsize=9, frameon=False, loc="upper left")

"""Map of the methods that pay on slow links: lockstep, compressed sums and local updates.

The time of a step is its compute, its messages by the formulas of `step_time`, and the passes over
memory in which gradients are coded. Nothing overlaps. Local updates send in one step of a period.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.devices.compression import BFloat16, Compression, Int8, PowerSGD, TopK
from stratagem.devices.local_updates import DiLoCo, LocalSGD, LocalUpdates
from stratagem.environment import load
from stratagem.errors import explain
from stratagem.planning.schedule import Reduction
from stratagem.planning.step_time import Assumptions, message_s
from stratagem.planning.targets import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Picture of a map of links: the chosen method by bandwidth and latency of the network.

_COLORS = (
    "#2a78b8",
    "#9fc5e0",
    "#3a9a5b",
    "#e3c53b",
    "#e8862e",
    "#c9a6dd",
    "#8a5bb8",
    "#c8372d",
    "#7f7f7f",
)
_SIZE_IN = (8.5, 5.0)
_SPEEDUPS = (1.5, 3.0, 10.0, 30.0, 100.0, 300.0)
_RATES = (
    (125e3, "1 Mbit/s"),
    (1.25e6, "10 Mbit/s"),
    (1.25e7, "100 Mbit/s"),
    (1.25e8, "1 Gbit/s"),
    (1.25e9, "10 Gbit/s"),
    (1.25e10, "100 Gbit/s"),
    (5e10, "400 Gbit/s"),
)
_TIMES = ((1e-5, "10 us"), (1e-4, "100 us"), (1e-3, "1 ms"), (1e-2, "10 ms"), (1e-1, "100 ms"))


def draw_link_map(found: LinkMap, path: str | Path) -> None:
    """Writes the picture to a file, in the format of its extension."""
    path = Path(path)
    figure = link_map_figure(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def link_map_figure(found: LinkMap) -> Figure:
    """Returns a matplotlib figure; ImportError without matplotlib."""
    by, install = "Drawing a map of links", "'stratagem[observe]'"
    figure = load("matplotlib.figure", needed_by=by, install=install).Figure(
        figsize=_SIZE_IN, layout="constrained"
    )
    colors = load("matplotlib.colors", needed_by=by, install=install)
    patches = load("matplotlib.patches", needed_by=by, install=install)
    axes = figure.subplots()
    choices = found.choices
    axes.pcolormesh(
        found.bandwidths_bytes_per_s,
        found.latencies_s,
        choices,
        cmap=colors.ListedColormap(_COLORS),
        vmin=-0.5,
        vmax=len(_COLORS) - 0.5,
        shading="nearest",
    )
    _draw_gains(axes, found)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _name_ticks(axes, found)
    axes.set_xlabel("bandwidth of the network between hosts, per device")
    axes.set_ylabel("latency of the network")
    axes.legend(
        handles=[
            patches.Patch(color=_COLORS[place % len(_COLORS)], label=method.name)
            for place, method in enumerate(found.methods)
            if place in choices
        ],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=9,
    )
    axes.set_title(
        f"{found.target.name}: the mildest method within {found.tolerance:.0%} of the fastest\n"
        "Lines: times faster than lockstep. Predicted, not measured.",
        fontsize=10,
        loc="left",
    )
    return figure


def _draw_gains(axes: Any, found: LinkMap) -> None:
    gains = found.step_s[0] / np.take_along_axis(found.step_s, found.choices[None], axis=0)[0]
    levels = [one for one in _SPEEDUPS if gains.min() < one < gains.max()]
    if min(gains.shape) < 2 or not levels:
        return
    lines = axes.contour(
        found.bandwidths_bytes_per_s,
        found.latencies_s,
        gains,
        levels=levels,
        colors="black",
        linewidths=0.8,
    )
    labels = axes.clabel(lines, inline=False, fmt=lambda level: f"{level:g}x", fontsize=8)
    for label in labels:
        label.set_color("black")
        label.set_rotation(0)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})


def _name_ticks(axes: Any, found: LinkMap) -> None:
    for axis, names, values in (
        (axes.xaxis, _RATES, found.bandwidths_bytes_per_s),
        (axes.yaxis, _TIMES, found.latencies_s),
    ):
        least, most = min(values) / 1.001, max(values) * 1.001
        shown = [(place, name) for place, name in names if least <= place <= most]
        axis.set_ticks([place for place, _ in shown], [name for _, name in shown], fontsize=8)
        axis.set_ticks([], minor=True)


_FLOAT_BYTES = 4
_TOLERANCE = 0.05
# How often an element is read or written while gradients are coded and decoded.
_PASSES: Mapping[type[Compression], int] = {BFloat16: 6, Int8: 10, PowerSGD: 6, TopK: 30}
# Rounded: the last digits of a power depend on the processor.
_BANDWIDTHS_BYTES_PER_S = tuple(float(f"{rate:.4g}") for rate in np.logspace(6, 11, 41))
_LATENCIES_S = tuple(float(f"{time_s:.4g}") for time_s in np.logspace(-5, -1, 33))


@dataclasses.dataclass(frozen=True)
class LinkMethod:
    """A way to combine what replicas learn: in each step or in one of several, whole or compressed.

    Args:
        name: name in the legend.
        compression: of the sums; None for whole ones.
        local_updates: method of local updates, whose own compression counts; None for lockstep.

    Example:
        >>> method = sg.planning.LinkMethod("DiLoCo", local_updates=sg.local_updates.DiLoCo())
        >>> method.period
        500

    Source: specific to Stratagem.
    """

    name: str
    compression: Compression | None = None
    local_updates: LocalUpdates | None = None

    @property
    def period(self) -> int:
        """Number of steps to a synchronization; 1 in lockstep."""
        return 1 if self.local_updates is None else self.local_updates.least_period

    @property
    def form(self) -> Compression | None:
        """Compression of the sums."""
        if self.local_updates is None:
            return self.compression
        form = self.local_updates.compression
        assert not isinstance(form, str)  # parsed by LocalUpdates
        return form


# From the one that changes training least.
LINK_METHODS = (
    LinkMethod("lockstep"),
    LinkMethod("bfloat16", BFloat16()),
    LinkMethod("int8", Int8()),
    LinkMethod("PowerSGD, rank 4", PowerSGD()),
    LinkMethod("top 1 %", TopK()),
    LinkMethod("local SGD, 8 steps", local_updates=LocalSGD(period=8)),
    LinkMethod("DiLoCo, 50 steps", local_updates=DiLoCo(period=50)),
    LinkMethod("DiLoCo, 500 steps", local_updates=DiLoCo(period=500)),
)


@dataclasses.dataclass(frozen=True)
class LinkMap:
    """Predicted step times of some methods by bandwidth and latency of the network.

    Args:
        target: the machine.
        methods: from the one that changes training least.
        bandwidths_bytes_per_s: of the network between hosts, for one device and direction.
        latencies_s: of the network.
        step_s: predicted seconds, shape (methods, latencies, bandwidths).
        tolerance: how much longer than the fastest one a method may take to be chosen.

    Example:
        >>> found = sg.planning.link_map(
        ...     [(4096, 4096)], sg.planning.parse_target("16xH100"), compute_s=0.1,
        ...     bandwidths_bytes_per_s=[1e6, 1e11], latencies_s=[1e-5])
        >>> found.chosen(1e11, 1e-5).name, found.chosen(1e6, 1e-5).name
        ('lockstep', 'PowerSGD, rank 4')

    Source: specific to Stratagem.
    """

    target: Target
    methods: tuple[LinkMethod, ...]
    bandwidths_bytes_per_s: tuple[float, ...]
    latencies_s: tuple[float, ...]
    step_s: np.ndarray
    tolerance: float = _TOLERANCE

    @property
    def choices(self) -> np.ndarray:
        """Index of the chosen method, shape (latencies, bandwidths): the mildest that is fast."""
        is_fast = self.step_s <= (1 + self.tolerance) * self.step_s.min(axis=0)
        return np.argmax(is_fast, axis=0)

    def chosen(self, bandwidth_bytes_per_s: float, latency_s: float) -> LinkMethod:
        """Returns the chosen method at the nearest point of the map.

        Args:
            bandwidth_bytes_per_s: bandwidth of the network.
            latency_s: latency of the network.
        """
        column = _nearest(self.bandwidths_bytes_per_s, bandwidth_bytes_per_s)
        return self.methods[self.choices[_nearest(self.latencies_s, latency_s), column]]

    def draw(self, path: str | Path) -> None:
        """Writes a picture of the map to a file, in the format of its extension.

        Args:
            path: the file.

        Raises:
            ImportError: matplotlib is missing.
        """
        draw_link_map(self, path)


def _nearest(values: Sequence[float], wanted: float) -> int:
    return int(np.argmin(np.abs(np.log(values) - math.log(wanted))))


def messages_of(
    form: Compression | None, shapes: Sequence[tuple[int, ...]], num_replicas: int
) -> list[Reduction]:
    """Returns the messages in which gradients of these shapes are summed once."""
    coded = [] if form is None else [shape for shape in shapes if form.compresses(shape)]
    whole = [shape for shape in shapes if form is None or not form.compresses(shape)]
    found: list[Reduction] = []
    if whole:
        found.append(Reduction("whole", sum(map(math.prod, whole)) * _FLOAT_BYTES, ()))
    if form is None or not coded:
        return found
    sent = form.sent_bytes(*coded, num_replicas=num_replicas) / (num_replicas - 1)
    if isinstance(form, TopK):
        return [*found, Reduction("elements", round(sent * num_replicas), (), "all-gather")]
    if isinstance(form, PowerSGD):
        sizes = (sum(math.prod(one[:-1]) for one in coded), sum(one[-1] for one in coded))
        factors = [form.rank * size * _FLOAT_BYTES for size in sizes]
        return [*found, *(Reduction("factors", size, ()) for size in factors)]
    size = round(sent * num_replicas / 2)
    return [
        *found,
        Reduction("parts", size, (), "all-to-all"),
        Reduction("sums", size, (), "all-gather"),
    ]


def link_map(
    shapes: Sequence[tuple[int, ...]],
    target: Target,
    compute_s: float,
    *,
    methods: Sequence[LinkMethod] = LINK_METHODS,
    bandwidths_bytes_per_s: Sequence[float] = _BANDWIDTHS_BYTES_PER_S,
    latencies_s: Sequence[float] = _LATENCIES_S,
    assumptions: Assumptions | None = None,
) -> LinkMap:
    """Predicts the step of each method for networks of any bandwidth and latency.

    Args:
        shapes: shapes of the trained variables.
        target: machine of several hosts or slices, one replica a device.
        compute_s: seconds of compute of a step.
        methods: from the one that changes training least.
        bandwidths_bytes_per_s: of the network, for one device and direction.
        latencies_s: of the network.
        assumptions: assumptions of the prediction, also of links inside hosts; None for defaults.

    Returns:
        The map.

    Raises:
        ValueError: a target of one host, or no shapes, methods, bandwidths or latencies.

    Example:
        >>> target = sg.planning.parse_target("16xH100")
        >>> found = sg.planning.link_map([(4096, 4096)], target, compute_s=0.1)
        >>> found.chosen(1e11, 1e-5).name
        'lockstep'

    Source: specific to Stratagem; step_time.py has the formulas.
    """
    rates = tuple(bandwidths_bytes_per_s)
    _check(target, shapes, methods, rates, latencies_s)
    assumed = assumptions or Assumptions()
    networks = [
        [
            dataclasses.replace(assumed, network_bytes_per_s=rate, network_latency_s=latency_s)
            for rate in rates
        ]
        for latency_s in latencies_s
    ]
    sent_s = [_sums_s(method.form, shapes, target, networks) for method in methods]
    step_s = np.stack(
        [compute_s + sums_s / method.period for sums_s, method in zip(sent_s, methods, strict=True)]
    )
    return LinkMap(target, tuple(methods), rates, tuple(latencies_s), step_s)


def _check(
    target: Target,
    shapes: Sequence[tuple[int, ...]],
    methods: Sequence[LinkMethod],
    rates: Sequence[float],
    latencies_s: Sequence[float],
) -> None:
    if target.num_groups > 1 and all(map(len, (shapes, methods, rates, latencies_s))):
        return
    raise ValueError(
        explain(
            f"A map of links was asked for {target.name}, {len(shapes)} variables and "
            f"{len(methods)} methods.",
            expected="several hosts or slices, and at least one variable, method, bandwidth and "
            "latency.",
            fix='plan for a larger target, such as "16xH100".',
        )
    )


def _sums_s(
    form: Compression | None,
    shapes: Sequence[tuple[int, ...]],
    target: Target,
    networks: Sequence[Sequence[Assumptions]],
) -> np.ndarray:
    """Returns the seconds of one sum of all gradients on each network, with their coding."""
    messages = messages_of(form, shapes, target.num_devices)
    sent_s = [
        [sum(message_s(one, target, network) for one in messages) for network in row]
        for row in networks
    ]
    return np.array(sent_s) + _coding_s(form, shapes, target, networks[0][0])


def _coding_s(
    form: Compression | None,
    shapes: Sequence[tuple[int, ...]],
    target: Target,
    assumed: Assumptions,
) -> float:
    if form is None:
        return 0.0
    elements = sum(math.prod(shape) for shape in shapes if form.compresses(shape))
    passes = _PASSES.get(type(form), _PASSES[Int8])
    rate = target.accelerator.memory_bytes_per_s * assumed.memory_share
    return passes * elements * _FLOAT_BYTES / rate

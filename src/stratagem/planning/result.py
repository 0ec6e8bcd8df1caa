"""The result of planning: `Plan`, as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.environment import load
from stratagem.errors import explain
from stratagem.logs import as_html, as_text, size_text
from stratagem.observe.profiling.recorder import read_profile
from stratagem.observe.profiling.summary import ProfileSummary
from stratagem.planning.accelerators import Accelerator
from stratagem.planning.link_map import LinkMap, link_map
from stratagem.planning.memory import MemoryPlan
from stratagem.planning.report import headline, parts_of, time_text, verdict
from stratagem.planning.schedule import Reduction, share_behind
from stratagem.planning.step_time import Assumptions, StepTime, for_any_size, predict_step
from stratagem.planning.targets import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Predicted parts of a step beside those that a profile measured.

# Parts of a profile that a plan does not predict.
_UNPREDICTED = ("copies", "input", "compilation", "host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedPart:
    """A part of a step, predicted and measured.

    Args:
        name: "compute", "collectives", "launch", a part that only a profile has, or "step".
        predicted_s: predicted seconds; None if plans do not predict it.
        measured_s: measured seconds of a step, as a mean over steps and devices.

    Example:
        >>> part = sg.planning.ComparedPart(name="compute", predicted_s=0.03, measured_s=0.04)
        >>> round(part.ratio, 2)
        0.75

    Source: specific to Stratagem.
    """

    name: str
    predicted_s: float | None
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Predicted divided by measured seconds; None without either."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan beside a profile.

    Args:
        parts: the parts, and last the whole step.
        notes: differences between what was planned and what was profiled.

    Example:
        >>> step = sg.planning.ComparedPart(name="step", predicted_s=0.03, measured_s=0.04)
        >>> sg.planning.Comparison(parts=(step,), notes=()).step.measured_s
        0.04

    Source: specific to Stratagem.
    """

    parts: tuple[ComparedPart, ...]
    notes: tuple[str, ...]

    @property
    def step(self) -> ComparedPart:
        """The whole step."""
        return self.parts[-1]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as numbers, strings, lists and dicts, ready for JSON.

        Returns:
            The parts, with their ratios, and the notes.
        """
        parts = [{**dataclasses.asdict(part), "ratio": part.ratio} for part in self.parts]
        return {"parts": parts, "notes": list(self.notes)}


def compare(step: StepTime, platform: str, profile: ProfileSummary | str | Path) -> Comparison:
    """Compares a predicted step on a platform with a profile; see `Plan.compare`."""
    summary = profile if isinstance(profile, ProfileSummary) else read_profile(profile)
    if not summary.num_steps:
        raise ValueError(
            explain(
                "The profile has no marks of steps, so the time of one step is unknown.",
                expected="a profile taken by sg.profile.",
                fix="profile fit or a loop of strategy.run with sg.profile.",
            )
        )
    measured = {name: part_s / summary.num_steps for name, part_s in summary.parts_s.items()}
    predicted = {
        "compute": step.compute_s,
        "collectives": step.reduction_s - step.hidden_s,
        "launch": step.launch_s,
    }
    parts = [
        ComparedPart(name=name, predicted_s=seconds, measured_s=measured[name])
        for name, seconds in predicted.items()
    ]
    parts += [
        ComparedPart(name=name, predicted_s=None, measured_s=measured[name])
        for name in _UNPREDICTED
        if measured[name]
    ]
    parts.append(ComparedPart(name="step", predicted_s=step.step_s, measured_s=summary.step_s))
    return Comparison(parts=tuple(parts), notes=tuple(_notes(step, platform, summary)))


def _notes(step: StepTime, platform: str, summary: ProfileSummary) -> list[str]:
    notes: list[str] = []
    if summary.platform != platform:
        notes.append(f"Measured on {summary.platform.upper()}, planned for {platform.upper()}.")
    if summary.num_devices > step.num_devices:
        notes.append(
            f"Measured on {summary.num_devices} devices of a process, planned for "
            f"{step.num_devices}."
        )
    return notes


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Estimated memory, communication and time of a training step on a target.

    Args:
        target: the machine.
        title: name of the model, step or script.
        compiler: compiler that was used: "tpu", "gpu" or "cpu".
        is_refused: True if the compiler rejected the step because it does not fit.
        num_parameters: number of elements of all trainable variables.
        global_batch: number of examples over all devices.
        num_replicas: number of replicas that split the batch.
        shard_state: state sharded over the replicas; None for nothing.
        shared_state_bytes: bytes of variables per device under each `shard_state`, if variables
            are replicated.
        from_host_bytes: bytes per step from the host to each device, if variables are stored there.
        to_host_bytes: bytes per step to the host, which updates them.
        brought_bytes: bytes per step that each device copies from pinned host memory.
        put_back_bytes: bytes per step that each device copies back.
        memory: memory of one device.
        reductions: messages between devices in one step, in program order.
        is_scheduled: True if program order is execution order.
        flops: FLOPs of matrix products of one device, by operand dtype.
        accessed_bytes: bytes that one device reads and writes, as counted by the compiler.
        products_s: seconds that the matrix products take.
        memory_s: seconds that the memory accesses take.
        num_launches: number of kernels that a GPU starts per step; 0 if unknown.
        scaling: predicted steps on one replica up to all.
        assumptions: assumptions of the time prediction.
        notes: further remarks.
        trained_shapes: shapes of the trained variables.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> plan = sg.plan(model, (np.ones((16, 8)), np.ones((16, 2))), "8xH100")
        >>> plan.num_replicas, plan.per_device_batch, plan.num_parameters
        (8, 2, 18)
        >>> [time.num_devices for time in plan.scaling]
        [1, 2, 4, 8]

    Source: specific to Stratagem.
    """

    target: Target
    title: str
    compiler: str
    is_refused: bool
    num_parameters: int
    global_batch: int
    num_replicas: int
    shard_state: str | None
    shared_state_bytes: dict[str, int]
    from_host_bytes: int
    to_host_bytes: int
    brought_bytes: int
    put_back_bytes: int
    memory: MemoryPlan
    reductions: tuple[Reduction, ...]
    is_scheduled: bool
    flops: dict[str, float]
    accessed_bytes: float
    products_s: float
    memory_s: float
    num_launches: int
    scaling: tuple[StepTime, ...]
    assumptions: Assumptions
    notes: tuple[str, ...]
    trained_shapes: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        return f"<Plan: {headline(self)}. {verdict(self)}>"

    def __str__(self) -> str:
        return as_text(parts_of(self))

    def _repr_html_(self) -> str:
        return as_html(parts_of(self))

    @property
    def fits(self) -> bool:
        """True if a step fits in the memory that JAX gives to programs by default."""
        return self.memory.fits and not self.is_refused

    @property
    def step(self) -> StepTime:
        """Predicted step on all devices."""
        return self.scaling[-1]

    @property
    def devices_per_replica(self) -> int:
        """Number of devices per replica."""
        return self.target.num_devices // self.num_replicas

    @property
    def per_device_batch(self) -> int:
        """Number of examples per device, including padding; devices of one replica share them."""
        return -(-self.global_batch // self.num_replicas)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that one device contributes to messages per step."""
        return round(sum(one.num_bytes * one.times for one in self.reductions))

    @property
    def hidden_share(self) -> float:
        """Fraction of these bytes sent while a device computes products."""
        return share_behind(self.reductions)

    def step_on(self, num_devices: int) -> StepTime:
        """Predicts the step on another number of devices of the same kind, without compiling.

        The batch per device, the number of messages and their sizes stay; only the time of each
        message is computed anew.

        Args:
            num_devices: at most the devices of one host or slice, or a multiple of them.

        Returns:
            The predicted step.

        Raises:
            ValueError: a number that does not fill hosts, slices or replicas, or a message that is
                sent in groups that span hosts or slices and are not all devices.
        """
        return predict_step(
            self._machine_of(num_devices),
            for_any_size(self.reductions, self.target),
            self.step.compute_s,
            self.assumptions,
            self.step.launch_s,
        )

    def compare(self, profile: ProfileSummary | str | Path) -> Comparison:
        """Compares the predicted step with a measured one.

        Args:
            profile: a profile by `sg.profile` of the same step on the target: its summary, or the
                path of its trace.

        Returns:
            Predicted and measured seconds of each part. The predicted step is on all devices.

        Raises:
            FileNotFoundError: there is no trace.
            ValueError: the profile cannot be read, or has no marks of steps.
        """
        return compare(self.step, self.target.accelerator.platform, profile)

    def link_map(self) -> LinkMap:
        """Maps where lockstep, compressed sums and local updates pay, by the network of the target.

        Returns:
            The map, with the compute of this plan and its assumptions.

        Raises:
            ValueError: a target of one host or slice, or replicas of several devices.
        """
        if self.devices_per_replica > 1:
            raise ValueError(
                explain(
                    f"A map of links was asked for replicas of {self.devices_per_replica} devices.",
                    expected="replicas of one device, whose sums can be compressed.",
                    fix="plan without a layout and without devices_per_replica.",
                )
            )
        compute_s = self.step.compute_s + self.step.launch_s
        return link_map(self.trained_shapes, self.target, compute_s, assumptions=self.assumptions)

    def _machine_of(self, num_devices: int) -> Target:
        machine = self.target.of_size(max(num_devices, 1))
        if machine.num_devices != num_devices or num_devices % self.devices_per_replica:
            raise ValueError(
                explain(
                    f"num_devices={num_devices!r} does not fill hosts, slices or replicas.",
                    expected=f"at most {machine.devices_per_group}, or a multiple of it, in "
                    f"replicas of {self.devices_per_replica}.",
                    fix="pass a number of whole hosts or slices.",
                )
            )
        return machine

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole plan as numbers, strings, lists and dicts, ready for JSON."""
        return {
            "target": self.target.name,
            "title": self.title,
            "num_devices": self.target.num_devices,
            "num_replicas": self.num_replicas,
            "devices_per_replica": self.devices_per_replica,
            "shard_state": self.shard_state,
            "shared_state_bytes": dict(self.shared_state_bytes),
            "compiler": self.compiler,
            "fits": self.fits,
            "is_refused_by_compiler": self.is_refused,
            "num_parameters": self.num_parameters,
            "global_batch": self.global_batch,
            "per_device_batch": self.per_device_batch,
            "from_host_bytes": self.from_host_bytes,
            "to_host_bytes": self.to_host_bytes,
            "brought_bytes": self.brought_bytes,
            "put_back_bytes": self.put_back_bytes,
            "memory": {
                **dataclasses.asdict(self.memory),
                "total_bytes": self.memory.total_bytes,
            },
            "reductions": [
                {**dataclasses.asdict(one), "groups": [list(group) for group in one.groups]}
                for one in self.reductions
            ],
            "reduced_bytes": self.reduced_bytes,
            "hidden_share": self.hidden_share,
            "is_scheduled": self.is_scheduled,
            "flops": dict(self.flops),
            "accessed_bytes": self.accessed_bytes,
            "products_s": self.products_s,
            "memory_s": self.memory_s,
            "num_launches": self.num_launches,
            "scaling": [_time_fields(time) for time in self.scaling],
            "assumptions": dataclasses.asdict(self.assumptions),
            "accelerator": _accelerator_fields(self.target.accelerator),
            "notes": list(self.notes),
            "trained_shapes": [list(shape) for shape in self.trained_shapes],
        }


def _time_fields(time: StepTime) -> dict[str, Any]:
    return {
        **dataclasses.asdict(time),
        "step_s": time.step_s,
        "shortest_s": time.shortest_s,
        "efficiency": time.efficiency,
    }


def _accelerator_fields(accelerator: Accelerator) -> dict[str, Any]:
    return {
        field.name: _plain_value(getattr(accelerator, field.name))
        for field in dataclasses.fields(accelerator)
        if field.name != "gpu_info"
    }


def _plain_value(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else value


# Plot of a plan with matplotlib: memory of a device, and step time by number of devices.

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
        "matplotlib.figure", needed_by="Plotting a plan", install="'stratagem[observe]'"
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

"""The result of planning: `Plan`, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from stratagem.errors import explain
from stratagem.logs import as_html, as_text
from stratagem.planning.accelerators import Accelerator
from stratagem.planning.memory import MemoryPlan
from stratagem.planning.report import headline, parts_of, verdict
from stratagem.planning.schedule import Reduction, share_behind
from stratagem.planning.step_time import Assumptions, StepTime, for_any_size, predict_step
from stratagem.planning.targets import Target


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

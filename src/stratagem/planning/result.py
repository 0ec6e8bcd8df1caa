"""A plan as data: what a step takes on a machine that is not here."""

from __future__ import annotations

import dataclasses
from typing import Any

from stratagem.planning.memory import MemoryPlan
from stratagem.planning.reductions import Reduction, share_behind
from stratagem.planning.step_time import Assumptions, StepTime
from stratagem.planning.targets import Target

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training step takes on each device of a target, and how long it is predicted to take.

    Args:
        target: the machine.
        title: whose step it is.
        compiler: which compiler was asked: that for "tpu", "gpu" or "cpu".
        is_refused: whether the compiler refused the step because it does not fit.
        num_parameters: elements of all trainable variables.
        global_batch: examples of all devices together.
        num_replicas: that share the batch.
        shard_state: what the replicas' devices have a part of each; None for nothing.
        shared_state_bytes: where each has copies: what variables one would hold otherwise, by
            `shard_state`.
        from_host_bytes: what each device is given in a step, where the host keeps variables.
        to_host_bytes: what the host gets then, to update them.
        brought_bytes: what each device brings over from pinned memory of the host in a step.
        put_back_bytes: what it puts back there.
        memory: of one device.
        reductions: what one step sends between devices, in the order of the program.
        is_scheduled: whether that order is the one in which it runs.
        flops: of the matrix products of one device, by dtype.
        accessed_bytes: that one device reads and writes, as the compiler counts.
        products_s: that these products take.
        memory_s: that these bytes take.
        scaling: predicted steps on 1 device up to all.
        assumptions: what the prediction takes for given.
        notes: what else one has to know.
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
    scaling: tuple[StepTime, ...]
    assumptions: Assumptions
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether a step fits into what programs get of a device's memory by default."""
        return self.memory.fits and not self.is_refused

    @property
    def step(self) -> StepTime:
        """The predicted step on all devices."""
        return self.scaling[-1]

    @property
    def devices_per_replica(self) -> int:
        """How many devices compute a replica."""
        return self.target.num_devices // self.num_replicas

    @property
    def per_device_batch(self) -> int:
        """Examples of one device, padding included; the devices of a replica have the same."""
        return -(-self.global_batch // self.num_replicas)

    @property
    def reduced_bytes(self) -> int:
        """What one device gives to reductions in a step."""
        return sum(one.num_bytes * one.times for one in self.reductions)

    @property
    def hidden_share(self) -> float:
        """The share of these bytes that travels while the backward pass multiplies matrices."""
        return share_behind(self.reductions)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts, as JSON takes them."""
        kind = self.target.accelerator
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
            "scaling": [
                {
                    **dataclasses.asdict(time),
                    "step_s": time.step_s,
                    "shortest_s": time.shortest_s,
                    "efficiency": time.efficiency,
                }
                for time in self.scaling
            ],
            "assumptions": dataclasses.asdict(self.assumptions),
            "accelerator": {
                field.name: _plain(getattr(kind, field.name))
                for field in dataclasses.fields(kind)
                if field.name != "gpu_info"
            },
            "notes": list(self.notes),
        }


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else value

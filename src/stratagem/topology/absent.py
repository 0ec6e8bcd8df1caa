"""Devices that are not here: what a strategy has on a machine that it is planned for.

Nothing computes on them and nothing is kept there. An array that would lie on them is a NumPy array
of its shape in which all elements are one: it takes no memory, however large it is. Small arrays
keep their values, because programs look at them: learning rates, counters, seeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from stratagem.messages import explain
from stratagem.topology.groups import neighbours, prime_factors
from stratagem.topology.mesh import REPLICA_AXIS, Topology

__all__ = [
    "AbsentDevice",
    "AbsentTopology",
    "is_too_large_to_keep",
    "placeholder",
    "planned_devices",
    "planned_groups",
    "planned_shard_state",
    "planned_topology",
    "planning_for",
    "refuse_to_plan",
]

# An array up to this size is kept as it is.
_KEPT_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """Stands for a device that is not here, with what programs ask of a `jax.Device`.

    Args:
        id: its number among all.
        platform: "gpu" or "tpu".
        device_kind: as JAX calls it.
        process_index: of the process that would have it.
        slice_index: of the slice, or the host of GPUs, that it belongs to.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int = 0

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"


class AbsentTopology(Topology):
    """Devices that are not here, as one process sees them that plans for all."""

    @property
    def is_absent(self) -> bool:
        """Always."""
        return True

    @cached_property
    def local_replica_ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(self.num_replicas))

    @cached_property
    def spans_processes(self) -> bool:
        """Never: nobody else takes part in a plan."""
        return False

    @cached_property
    def mesh(self) -> Any:
        """A mesh without devices, which is enough to trace and to lower a program."""
        sizes = (self.num_replicas, *prime_factors(self.num_logical_devices))
        names = (REPLICA_AXIS, *self.logical_axes)
        # As `jax.sharding.Mesh` has them; newer JAX chooses others.
        axis_types = (AxisType.Auto,) * len(names)
        return AbstractMesh(sizes, names, axis_types=axis_types)

    def replicate(self, value: Any) -> Any:
        """Returns what stands for a copy of a value on every device."""
        return _kept(value)

    def put_stacked(self, array: Any, *, axis: int = 0) -> Any:
        """Returns what stands for an array with a replica axis."""
        return _kept(array)

    def stack(self, values: list[Any]) -> Any:
        """Returns what stands for one array a replica, joined."""
        if any(isinstance(value, Tracer) for value in values):
            return jax.numpy.stack([jax.numpy.asarray(value) for value in values])
        if is_too_large_to_keep(values[0].shape, values[0].dtype):
            return placeholder((len(values), *values[0].shape), values[0].dtype)
        return _kept(np.stack([np.asarray(value) for value in values]))


def placeholder(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns an array of zeros that takes no memory.

    Args:
        shape: its shape.
        dtype: its dtype, which becomes the one that JAX would make of it.
    """
    zero = np.zeros((), jax.dtypes.canonicalize_dtype(dtype))
    return np.broadcast_to(zero, tuple(shape))


def is_too_large_to_keep(shape: Sequence[int], dtype: Any) -> bool:
    """Tells whether the values of an array are not kept on absent devices."""
    return math.prod(shape) * jax.dtypes.canonicalize_dtype(dtype).itemsize > _KEPT_BYTES


def _kept(value: Any) -> Any:
    if isinstance(value, Tracer):
        return value
    if not isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value)
    if is_too_large_to_keep(value.shape, value.dtype):
        return placeholder(value.shape, value.dtype)
    return np.asarray(value).astype(jax.dtypes.canonicalize_dtype(value.dtype))


class _Planned:
    """The devices that strategies are planned for, in all threads: None where nothing is."""

    topology: AbsentTopology | None = None
    shard_state: str | None = None


_planned = _Planned()


@contextlib.contextmanager
def planning_for(topology: AbsentTopology, shard_state: str | None = None) -> Generator[None]:
    """Lets every strategy that is made from now on have these devices in place of local ones.

    Args:
        topology: the devices.
        shard_state: what strategies that could share state out do share out; None for what each
            was asked for.
    """
    before = (_planned.topology, _planned.shard_state)
    _planned.topology, _planned.shard_state = topology, shard_state
    try:
        yield
    finally:
        _planned.topology, _planned.shard_state = before


def planned_shard_state() -> str | None:
    """Returns what strategies are to share out while they are planned; None for as they are."""
    return _planned.shard_state


def planned_devices(num_named: int | None = None) -> tuple[Any, ...] | None:
    """Returns the devices to take in place of local ones; None where nothing is planned.

    Args:
        num_named: how many a program has named: one stays one, several become all.
    """
    if _planned.topology is None:
        return None
    devices = _planned.topology.devices
    assert devices is not None
    return devices[:1] if num_named == 1 else devices


def planned_groups(num_named: int, size: int) -> tuple[tuple[Any, ...], ...] | None:
    """Returns groups of devices to take in place of local ones; None where nothing is planned.

    Args:
        num_named: how many groups a program has named: one stays one, several become as many as
            there are devices for.
        size: how many devices a group has.

    Raises:
        ValueError: the devices of a host cannot be divided so.
    """
    if _planned.topology is None:
        return None
    devices = _planned.topology.devices
    assert devices is not None
    per_host = min(Counter(device.process_index for device in devices).values())
    if size > per_host or (num_named > 1 and per_host % size):
        raise ValueError(
            explain(
                f"Replicas of {size} devices are planned for hosts of {per_host} devices.",
                expected="groups of one size that fill a host: a replica does not leave it.",
                fix="name groups of another size, or plan for another machine.",
            )
        )
    if num_named == 1:
        return (devices[:size],)
    return neighbours(devices, size)


def refuse_to_plan(what: str) -> None:
    """Raises while a step is planned.

    Args:
        what: cannot be.

    Raises:
        ValueError: one is.
    """
    if _planned.topology is not None:
        raise ValueError(
            explain(
                f"{what} was made while a step is planned.",
                expected="variables on the replicas' devices, as copies or in parts.",
                fix="make the model under MirroredStrategy to plan it.",
            )
        )


def planned_topology(topology: Topology) -> Topology:
    """Returns the topology that a strategy has: an absent one while it is planned for others.

    Args:
        topology: that it would have.
    """
    if _planned.topology is None or topology.devices is None:
        return topology
    return AbsentTopology(topology.devices, topology.groups)

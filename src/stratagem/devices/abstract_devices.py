"""Abstract devices: stand-ins for the devices of a machine that a step is planned for.

Nothing is computed on them. Large arrays become NumPy arrays of the same shape whose elements share
one, so they take no memory. Small arrays keep their values, which programs read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from stratagem.devices.mesh import Topology, adjacent_groups
from stratagem.errors import explain

# Arrays up to this size keep their values.
_MAX_VALUE_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class AbstractDevice:
    """Stand-in for a `jax.Device`; `slice_index` is its TPU slice or GPU host."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int = 0

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"


class AbstractTopology(Topology):
    """A topology of abstract devices, seen by one process that plans for all."""

    is_abstract = True

    def with_shard_size(self, shard_size: int | None) -> Topology:
        """Returns the topology with the shard size that planning imposes, or this one."""
        return super().with_shard_size(_planned.shard_size or shard_size)

    @cached_property
    def local_replica_ids(self) -> tuple[int, ...]:
        """All replicas."""
        return tuple(range(self.num_replicas))

    @cached_property
    def spans_processes(self) -> bool:
        """False: a plan is made by one process."""
        return False

    @cached_property
    def mesh(self) -> Any:
        """An abstract mesh, which is enough to trace and lower a program."""
        names = (*self.replica_axes, *self.logical_axes)
        # The axis types of `jax.sharding.Mesh`; newer JAX defaults to others.
        axis_types = (AxisType.Auto,) * len(names)
        return AbstractMesh(self._mesh_shape, names, axis_types=axis_types)

    def replicate(self, value: object) -> Any:
        """Returns the abstract form of a replicated value."""
        return _abstract_value(value)

    def put_stacked(self, array: jax.Array | np.ndarray, *, axis: int = 0) -> Any:
        """Returns the abstract form of an array with a replica axis."""
        return _abstract_value(array)

    def stack(self, values: list[Any]) -> Any:
        """Returns the abstract form of stacked replica values."""
        if any(isinstance(value, Tracer) for value in values):
            return jax.numpy.stack([jax.numpy.asarray(value) for value in values])
        if exceeds_value_limit(values[0].shape, values[0].dtype):
            return placeholder((len(values), *values[0].shape), values[0].dtype)
        return _abstract_value(np.stack([np.asarray(value) for value in values]))


def placeholder(shape: Sequence[int], dtype: object) -> np.ndarray[Any, Any]:
    """Returns an array of zeros that takes no memory, with JAX's canonical dtype."""
    zero = np.zeros((), jax.dtypes.canonicalize_dtype(dtype))
    return np.broadcast_to(zero, tuple(shape))


def exceeds_value_limit(shape: Sequence[int], dtype: object) -> bool:
    """Returns True if abstract devices do not keep the values of such an array."""
    return math.prod(shape) * jax.dtypes.canonicalize_dtype(dtype).itemsize > _MAX_VALUE_BYTES


def _abstract_value(value: object) -> Any:
    if isinstance(value, Tracer):
        return value
    if not isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value)
    if exceeds_value_limit(value.shape, value.dtype):
        return placeholder(value.shape, value.dtype)
    return np.asarray(value).astype(jax.dtypes.canonicalize_dtype(value.dtype))


class _PlannedTarget:
    """Planned devices, sharded state and default strategy for all threads; None if not planned."""

    topology: AbstractTopology | None = None
    shard_state: str | None = None
    shard_size: int | None = None
    make_strategy: Callable[[], Any] | None = None


_planned = _PlannedTarget()


@contextlib.contextmanager
def planning_for(
    topology: AbstractTopology,
    shard_state: str | None = None,
    make_strategy: Callable[[], Any] | None = None,
    shard_size: int | None = None,
) -> Generator[None]:
    """Gives strategies created within the block these devices instead of local ones.

    None for `shard_state` and `shard_size` keeps the strategies' own; None for `make_strategy`
    creates no strategy for models without one.
    """
    before = vars(_planned).copy()
    _planned.topology, _planned.shard_state = topology, shard_state
    _planned.make_strategy, _planned.shard_size = make_strategy, shard_size
    try:
        yield
    finally:
        vars(_planned).clear()
        vars(_planned).update(before)


def planned_default_strategy() -> Any:
    """Returns a strategy for a model without one; None if nothing is planned."""
    return None if _planned.make_strategy is None else _planned.make_strategy()


def planned_shard_state() -> str | None:
    """Returns the `shard_state` that planning imposes, or None."""
    return _planned.shard_state


def planned_devices(num_named: int | None = None) -> tuple[Any, ...] | None:
    """Returns the devices to use instead of local ones, or None if nothing is planned.

    A program that named one device gets one, any other gets all.
    """
    if _planned.topology is None:
        return None
    devices = _planned.topology.devices
    assert devices is not None
    return devices[:1] if num_named == 1 else devices


def planned_groups(num_named: int, size: int) -> tuple[tuple[Any, ...], ...] | None:
    """Returns device groups to use instead of local ones, or None if nothing is planned.

    A program that named one group gets one, any other as many as fit. Raises ValueError if groups
    of this size do not fill a host.
    """
    if _planned.topology is None:
        return None
    devices = _planned.topology.devices
    assert devices is not None
    per_host = min(Counter(device.process_index for device in devices).values())
    if size > per_host or (num_named > 1 and per_host % size):
        raise ValueError(
            explain(
                f"Replicas of {size} devices do not fit on hosts of {per_host} devices.",
                expected="groups of devices of one process that fill its host evenly.",
                fix="use groups of another size, or MultiWorkerMirroredStrategy("
                f"devices_per_replica={size}), whose replicas may span hosts.",
                code="SG801",
            )
        )
    if num_named == 1:
        return (devices[:size],)
    return adjacent_groups(devices, size)


def refuse_to_plan(what: str) -> None:
    """Raises ValueError for an object that cannot be planned, if a step is being planned."""
    if _planned.topology is not None:
        raise ValueError(
            explain(
                f"{what} cannot be planned.",
                expected="variables that are replicated or sharded over the replicas' devices.",
                fix="create the model under MirroredStrategy to plan it.",
                code="SG801",
            )
        )


def planned_topology(topology: Topology) -> Topology:
    """Returns the topology, with abstract devices if a step is being planned."""
    if _planned.topology is None or topology.devices is None:
        return topology
    return AbstractTopology(topology.devices, topology.groups, shard_size=topology.shard_size)

"""`Topology`: the devices of a strategy as a mesh with a replica axis.

Shards of state may be on a second axis of replicas, and the devices of one replica form further
axes. If the devices belong to several processes, each process puts data on its own devices, and the
shards together form one array. A replica may span processes, which then all feed it the same data.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    get_mesh,
    set_mesh,
)

from stratagem.devices.private import uncommitted
from stratagem.errors import check_type, invalid

# Held while a program starts on several devices: programs with collectives wait for each other
# forever if devices start them in different orders. Strategies may share devices, so all share it.
start_lock = threading.RLock()

# Groups of devices: a replica computes on all devices of its group, its logical devices.


def check_groups(
    groups: Sequence[Sequence[jax.Device]],
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns device groups as tuples, one per replica.

    A group may have all devices of several processes. Raises ValueError for missing, empty or
    unequal groups, a repeated device, or a group with some devices of several processes.
    """
    sizes = [len(group) for group in groups]
    if not sizes or not all(sizes) or len(set(sizes)) > 1:
        raise invalid(
            f"The device groups have {', '.join(map(str, sizes)) or 'no'} devices.",
            expected="the same number of devices for each replica, at least one.",
            fix="give each replica the same number of devices.",
            code="SG104",
        )
    counts = Counter(device for group in groups for device in group)
    repeated = sorted(str(device) for device, count in counts.items() if count > 1)
    if repeated:
        raise invalid(
            f"The device groups contain {', '.join(repeated)} more than once.",
            expected="each device at most once: a device belongs to one replica.",
            fix="remove the duplicates.",
        )
    _check_processes(groups)
    return tuple(tuple(group) for group in groups)


def _check_processes(groups: Sequence[Sequence[jax.Device]]) -> None:
    """Raises ValueError for a group that shares one of its several processes with another."""
    processes = [{device.process_index for device in group} for group in groups]
    num_groups = Counter(process for group in processes for process in group)
    for group, own in zip(groups, processes, strict=True):
        if len(own) > 1 and any(num_groups[process] > 1 for process in own):
            raise invalid(
                f"The group {', '.join(map(str, group))} has a part of the devices of several "
                "processes.",
                expected="groups within one process, or of all devices of several processes.",
                fix="use groups that divide the devices of one process, or that are a multiple "
                "of them.",
                code="SG104",
            )


def adjacent_groups(
    devices: Sequence[jax.Device], devices_per_replica: int
) -> tuple[tuple[jax.Device, ...], ...]:
    """Divides devices, ordered by process, into groups of adjacent ones.

    A group is within a process, or has all devices of several. Raises ValueError if the devices
    cannot be divided evenly in this way.
    """
    wanted = "an int, 1 for one replica per device"
    check_type("devices_per_replica", devices_per_replica, int, wanted)
    counts = Counter(device.process_index for device in devices)
    if devices_per_replica < 1 or not _fit(devices_per_replica, len(devices), counts.values()):
        several = (
            f", or a multiple of it that divides the {len(devices)} devices of all processes"
            if len(counts) > 1
            else ""
        )
        raise invalid(
            f"devices_per_replica={devices_per_replica} does not divide the "
            f"{min(counts.values())} devices of each process.",
            expected=f"a divisor of that number, at least 1{several}.",
            fix="use a divisor, or change the visible devices (CUDA_VISIBLE_DEVICES).",
            code="SG104",
        )
    starts = range(0, len(devices), devices_per_replica)
    return check_groups([devices[start : start + devices_per_replica] for start in starts])


def _fit(size: int, num_devices: int, counts: Collection[int]) -> bool:
    """Returns True if groups of a size divide each process, or have several whole processes."""
    if all(count % size == 0 for count in counts):
        return True
    return num_devices % size == 0 and len({*counts}) == 1 and size % min(counts) == 0


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a positive number in ascending order."""
    factors: list[int] = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)


REPLICA_AXIS = "replica"
# Replicas that together store one copy of sharded state, if there are several copies.
SHARD_AXIS = "shard"


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices that replicas compute on: one device, or a group of devices, per replica.

    `devices` holds the first device of each group in replica order, or is None for JAX's default
    device; `groups` is None for one device per replica. `first_replica_id` counts the replicas of
    earlier workers, if workers are not in lockstep. `shard_size` adjacent replicas store one copy
    of sharded state together; None for all replicas.
    """

    is_abstract: ClassVar[bool] = False  # True if the devices are abstract, for planning only

    devices: tuple[jax.Device, ...] | None
    groups: tuple[tuple[jax.Device, ...], ...] | None = None
    first_replica_id: int = 0
    shard_size: int | None = None

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[jax.Device]]) -> Topology:
        """Returns the topology of replicas with several devices each; raises as `check_groups`."""
        checked = check_groups(groups)
        devices = tuple(group[0] for group in checked)
        return cls(devices, checked) if len(checked[0]) > 1 else cls(devices)

    def with_shard_size(self, shard_size: int | None) -> Topology:
        """Returns the topology in which so many adjacent replicas store one copy of sharded state.

        Raises ValueError for a number that does not divide the replicas.
        """
        if shard_size is None:
            return self
        count = self.num_replicas
        if not isinstance(shard_size, int) or shard_size < 1 or count % shard_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            sizes = [size for size in range(1, count + 1) if count % size == 0]
            raise invalid(
                f"shard_size={shard_size!r} was given for {count} replicas.",
                expected=f"a divisor of the number of replicas: one of {sizes}.",
                fix="pass the number of replicas of a machine, or leave shard_size out to "
                "shard over all replicas.",
            )
        return dataclasses.replace(self, shard_size=None if shard_size == count else shard_size)

    def __post_init__(self) -> None:
        check_type("devices", self.devices, tuple | None, "a tuple of jax.Device, or None")
        if self.devices == ():
            raise invalid(
                "devices=() is empty.",
                expected="at least one device, or None for JAX's default device.",
                fix="pass what find_devices returns.",
            )

    def __str__(self) -> str:
        if self.groups is None:
            return ", ".join(map(str, self.devices or ()))
        return ", ".join(f"[{', '.join(map(str, group))}]" for group in self.groups)

    @functools.cached_property
    def num_replicas(self) -> int:
        """Number of replicas, at least 1."""
        return len(self.devices) if self.devices else 1

    @property
    def num_shards(self) -> int:
        """Number of replicas that store one copy of sharded state together."""
        return self.shard_size or self.num_replicas

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes of the replicas, for `axis_names` of `jax.shard_map`."""
        return (REPLICA_AXIS,) if self.shard_size is None else (REPLICA_AXIS, SHARD_AXIS)

    @property
    def replica_axis(self) -> str | tuple[str, ...]:
        """Name of the replica axis, for collectives and partition specs; a tuple for two axes."""
        return REPLICA_AXIS if self.shard_size is None else self.replica_axes

    @property
    def shard_axis(self) -> str:
        """Name of the mesh axis that sharded state is divided over."""
        return self.replica_axes[-1]

    @functools.cached_property
    def local_replica_ids(self) -> tuple[int, ...]:
        """Replicas with devices of this process."""
        if self.devices is None:
            return (0,)
        if not self.spans_processes:
            return tuple(range(len(self.devices)))
        return tuple(index for index in range(self.num_replicas) if self._local_devices_of(index))

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas on this process."""
        return len(self.local_replica_ids)

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...] | None:
        """First local device of each local replica; None for JAX's default device."""
        if self.devices is None:
            return None
        return tuple(self._local_devices_of(index)[0] for index in self.local_replica_ids)

    @property
    def num_logical_devices(self) -> int:
        """Number of devices per replica, at least 1."""
        return len(self.groups[0]) if self.groups else 1

    @functools.cached_property
    def logical_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes of a replica's devices, one per prime factor of their number.

        So arrays can be sharded over any divisor of it.
        """
        count = len(prime_factors(self.num_logical_devices))
        return ("logical",) if count == 1 else tuple(f"logical_{i}" for i in range(count))

    @functools.cached_property
    def all_devices(self) -> tuple[jax.Device, ...] | None:
        """Devices of all replicas and groups; None for JAX's default device."""
        return self.devices if self.groups is None else sum(self.groups, ())

    def devices_of(self, replica_id: int) -> tuple[jax.Device, ...]:
        """Returns the devices of a replica; () for JAX's default device."""
        if self.devices is None:
            return ()
        return self.groups[replica_id] if self.groups else (self.devices[replica_id],)

    def _local_devices_of(self, replica_id: int) -> tuple[jax.Device, ...]:
        """Returns the devices of a replica in this process; () for JAX's default device."""
        devices = self.devices_of(replica_id)
        if not self.spans_processes:
            return devices
        own = jax.process_index()
        return tuple(device for device in devices if device.process_index == own)

    @functools.cached_property
    def spans_processes(self) -> bool:
        """True if the devices belong to several processes."""
        return len({device.process_index for device in self.all_devices or ()}) > 1

    @functools.cached_property
    def processes_of_inputs(self) -> tuple[tuple[int, ...], ...]:
        """Processes by the replicas that they feed, in replica order; several feed the same."""
        found: dict[tuple[int, ...], None] = {}
        for replica_id in range(self.num_replicas):
            own = [device.process_index for device in self.devices_of(replica_id)]
            found.setdefault(tuple(dict.fromkeys(own or [0])))
        return tuple(found)

    @property
    def platform(self) -> str:
        """Platform of the devices: "cpu", "gpu" or "tpu"."""
        return str((self.devices or jax.local_devices()[:1])[0].platform)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Mesh with the axes of the replicas, followed by `logical_axes`."""
        devices = np.array(self.all_devices or jax.local_devices()[:1])
        return Mesh(devices.reshape(self._mesh_shape), (*self.replica_axes, *self.logical_axes))

    @property
    def _mesh_shape(self) -> tuple[int, ...]:
        replicas = () if self.shard_size is None else (self.shard_size,)
        count = self.num_replicas // self.num_shards if replicas else self.num_replicas
        return (count, *replicas, *prime_factors(self.num_logical_devices))

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Sharding with a full copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """Sharding of an array with replicas on axis 0."""
        return NamedSharding(self.mesh, PartitionSpec(self.replica_axis))

    @functools.cached_property
    def stacked_steps(self) -> NamedSharding:
        """Sharding of an array with steps on axis 0 and replicas on axis 1."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.replica_axis))

    def replicate(self, value: object) -> jax.Array:
        """Copies a value, the same on all processes, to every device; each process to its own."""
        if self.devices is None:
            return jax.numpy.asarray(value)
        if not self.spans_processes or isinstance(value, Tracer):
            return jax.device_put(value, self.replicated)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding.is_equivalent_to(self.replicated, value.ndim):
                return value
            value = value.addressable_data(0)
        own = [one for index in self.local_replica_ids for one in self._local_devices_of(index)]
        parts = [jax.device_put(value, device) for device in own]
        return jax.make_array_from_single_device_arrays(parts[0].shape, self.replicated, parts)

    def put_stacked(self, array: jax.Array | np.ndarray, *, axis: int = 0) -> jax.Array:
        """Puts an array with a replica axis on the devices, in one transfer where possible.

        The array has one row per replica of this process along `axis`: 0, or 1 after an axis of
        steps. Returns the array of all replicas, sharded over that axis.
        """
        sharding = self.stacked_steps if axis else self.stacked
        if not self.spans_processes or isinstance(array, Tracer):
            return jax.device_put(array, sharding)
        shape = (*array.shape[:axis], self.num_replicas, *array.shape[axis + 1 :])
        rows = (slice(None),) * axis
        parts = [
            jax.device_put(array[(*rows, slice(index, index + 1))], device)
            for index, replica_id in enumerate(self.local_replica_ids)
            for device in self._local_devices_of(replica_id)
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def stack(self, values: list[Any]) -> jax.Array:
        """Stacks one array per local replica into one of shape (num_replicas, ...).

        Row i is on the devices of replica i. The default topology accepts any number of rows, and
        stores them on JAX's default device.
        """
        if self.devices is not None and len(values) != self.num_local_replicas:
            raise invalid(
                f"Received {len(values)} values for {self.num_local_replicas} replicas.",
                expected="one value per replica of this process.",
                fix="pass one value per local replica.",
            )
        if any(isinstance(value, Tracer) for value in values):
            return jax.numpy.stack([jax.numpy.asarray(value) for value in values])
        with jax.ensure_compile_time_eval():  # also in merge_call, while a step is traced
            if self.devices is None:  # via the host, since they may be on different devices
                return jax.numpy.stack([jax.numpy.asarray(v) for v in jax.device_get(values)])
            parts = [
                jax.device_put(_with_replica_axis(value), device)
                for value, replica_id in zip(values, self.local_replica_ids, strict=True)
                for device in self._local_devices_of(replica_id)
            ]
            shape = (self.num_replicas, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self.stacked, parts)


def _with_replica_axis(value: object) -> Any:
    """Adds a leading axis of size 1, on the host if possible.

    On a device each shape would need another program.
    """
    if isinstance(value, jax.Array):
        is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
        if is_key or next(iter(value.devices())).platform != "cpu":
            return value[None]
    return np.asarray(value)[None]


# The mesh of `jax.set_mesh`, which does not apply to what a strategy runs on its own mesh.
#
# JAX requires that a program's mesh is the one in context, moves arrays that are not committed to
# the devices of that mesh, and gives new arrays a type that names it, if its axes are explicit. So
# each call into a strategy leaves the mesh: it takes the user's arrays off it, and returns arrays
# that JAX may move to it again. Code of the user between such calls sees the mesh as before.
#
# Source: JAX 0.12 mesh_utils and sharding_impls.py, set_mesh.


_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_MESH = Mesh(np.empty((), object), ())
_IN_JIT = (
    "jax.jit compiles this for the devices of the mesh that jax.set_mesh has set. Call it outside "
    "of jax.jit, use sg.function in place of jax.jit, or leave the mesh around jax.jit."
)


def outside_context_mesh(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that computes on the devices of a strategy, not on the context mesh."""

    @functools.wraps(fn)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        mesh = get_abstract_mesh()  # takes 50 ns
        if not mesh.axis_names or AxisType.Manual in mesh.axis_types:  # none, or our own in a step
            return fn(*args, **kwargs)
        try:
            left = _Left()
        except ValueError:  # JAX fixes the mesh of what it traces
            try:
                return fn(*args, **kwargs)
            except (ValueError, KeyError) as error:
                error.add_note(_IN_JIT)
                raise
        with left:
            taken: Any = left.taken
            called: Any = fn  # with the same arguments, of other arrays
            result = called(*map(taken, args), **{name: taken(kwargs[name]) for name in kwargs})
        return _mapped(uncommitted, result)

    return outside


class _Left:
    """A block without the context mesh; raises ValueError while JAX traces."""

    def __init__(self) -> None:
        self._mesh = get_mesh()
        self._block: Any = set_mesh(_NO_MESH)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._block.__exit__(*error)

    def taken(self, value: Any) -> Any:
        """Returns arguments with their arrays on one device instead of the mesh that was left."""
        return _mapped(self._taken, value)

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, jax.Array) or isinstance(value, Tracer):
            return value
        sharding = value.sharding
        is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == self._mesh
        return on_one_device(value) if is_on_mesh or is_explicit(value) else value


def is_explicit(array: object) -> bool:
    """Returns True for an array whose type names a mesh, so that it combines with no others."""
    if not isinstance(array, jax.Array):
        return False
    return AxisType.Explicit in array.aval.sharding.mesh.axis_types


def on_one_device(array: jax.Array) -> jax.Array:
    """Returns a whole array that is on no mesh; unchanged if other processes have parts of it."""
    if not array.is_fully_addressable:
        return array
    if not array.is_fully_replicated:
        # Put on a device alone, it would keep its type.
        mesh = Mesh(np.array([array.addressable_shards[0].device]), ("all",))
        array = jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
    return uncommitted(array.addressable_data(0))


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Maps the leaves of nested lists, tuples and dicts; other containers keep what is theirs."""
    return jax.tree.map(fn, value, is_leaf=lambda one: not isinstance(one, list | tuple | dict))

"""The devices of a strategy as a mesh with one axis, the replica axis."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stratagem.messages import explain

__all__ = ["REPLICA_AXIS", "Topology"]

REPLICA_AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices that replicas compute on, one device a replica.

    Args:
        devices: in replica order; None for whatever JAX's default device is.

    Raises:
        TypeError: `devices` is no tuple.
        ValueError: an empty one.
    """

    devices: tuple[jax.Device, ...] | None

    def __post_init__(self) -> None:
        if self.devices is not None and not isinstance(self.devices, tuple):
            raise TypeError(
                explain(
                    f"devices={self.devices!r} is of type {type(self.devices).__name__}.",
                    expected="a tuple of jax.Device, or None.",
                    fix="pass what find_devices returns.",
                )
            )
        if self.devices == ():
            raise ValueError(
                explain(
                    "devices=() leaves no device to compute on.",
                    expected="at least one, or None for JAX's default device.",
                    fix="pass what find_devices returns.",
                )
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas, at least 1."""
        return len(self.devices) if self.devices else 1

    @property
    def platform(self) -> str:
        """What JAX calls the kind of the devices: "cpu", "gpu", "tpu"."""
        return str((self.devices or jax.local_devices()[:1])[0].platform)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Mesh with the one axis `"replica"`."""
        return Mesh(np.array(self.devices or jax.local_devices()[:1]), (REPLICA_AXIS,))

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Sharding that puts a whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """Sharding of an array whose axis 0 is the replica axis."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    @functools.cached_property
    def stacked_steps(self) -> NamedSharding:
        """Sharding of an array with steps on axis 0 and replicas on axis 1."""
        return NamedSharding(self.mesh, PartitionSpec(None, REPLICA_AXIS))

    def replicate(self, value: Any) -> jax.Array:
        """Puts a copy of a value on every device.

        Args:
            value: array, or anything that NumPy turns into one.

        Returns:
            One array; with the default topology, on JAX's default device.
        """
        if self.devices is None:
            return jax.numpy.asarray(value)
        return jax.device_put(value, self.replicated)

    def stack(self, values: list[Any]) -> jax.Array:
        """Joins one array a replica to one array with the replica axis first.

        Args:
            values: arrays of one shape and dtype, in replica order; one a device.

        Returns:
            Array of shape (num_replicas, ...), component i on device i; with the default topology,
            of any number of components, on JAX's default device.

        Raises:
            ValueError: not as many values as devices.
        """
        if self.devices is not None and len(values) != len(self.devices):
            raise ValueError(
                explain(
                    f"{len(values)} values were given for {len(self.devices)} replicas.",
                    expected="one value a replica.",
                    fix="pass as many values as the topology has devices.",
                )
            )
        if any(isinstance(value, Tracer) for value in values):
            return jax.numpy.stack([jax.numpy.asarray(value) for value in values])
        with jax.ensure_compile_time_eval():  # also in merge_call, while a step is traced
            if self.devices is None:  # by way of the host: they may lie on different devices
                return jax.numpy.stack([jax.numpy.asarray(v) for v in jax.device_get(values)])
            parts = [
                jax.device_put(_with_replica_axis(value), device)
                for value, device in zip(values, self.devices, strict=True)
            ]
            shape = (self.num_replicas, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self.stacked, parts)


def _with_replica_axis(value: Any) -> Any:
    """Adds an axis of size 1, on the host where the value is within its reach.

    On a device it would be one more program for every shape and device.
    """
    if isinstance(value, jax.Array):
        is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
        if is_key or next(iter(value.devices())).platform != "cpu":
            return value[None]
    return np.asarray(value)[None]

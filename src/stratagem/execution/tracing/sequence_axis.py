"""Sequence parallelism: the arguments of a step in parts, over the devices of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.logs import warn_on_one_worker
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts
    from stratagem.devices.mesh import Topology


def split_sequences(strategy: StrategyParts, arguments: Any) -> Any:
    """Splits the sequence axis of a replica's arguments, if the strategy has one.

    The compiler then computes all that follows in parts. Arrays without the axis, or with one of
    size 1, stay whole; so do those that cannot be divided evenly, with a warning.
    """
    axis, topology = strategy.sequence_axis, strategy.topology
    if axis is None or topology.num_logical_devices == 1:
        return arguments
    return jax.tree.map(lambda value: _split(value, axis, topology), arguments)


def _split(value: Any, axis: int, topology: Topology) -> Any:
    shape = jnp.shape(value) if isinstance(value, jax.Array) else ()
    if len(shape) <= axis or shape[axis] == 1:
        return value
    if shape[axis] % topology.num_logical_devices:
        _warn_of_uneven(shape, axis, topology.num_logical_devices)
        return value
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec(*[None] * axis, topology.logical_axes)
    sharding = NamedSharding(topology.mesh if mesh.empty else mesh, spec)
    return jax.lax.with_sharding_constraint(value, sharding)


def _warn_of_uneven(shape: tuple[int, ...], axis: int, count: int) -> None:
    warn_on_one_worker(
        explain(
            f"An argument of shape {shape} cannot be divided along sequence_axis={axis}: "
            f"{shape[axis]} over {count} devices. Each device computes all of it.",
            expected="a length that is a multiple of the number of devices of a replica.",
            fix=f"pad sequences to a multiple of {count}. Results are the same.",
        ),
        stacklevel=2,
    )

"""Sums and means over replicas of which some may be left out of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.all_reduce import AllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.mesh import Topology
from stratagem.options import ReduceOp
from stratagem.strategies.base.automatic import AutomaticOps


class BackedOps(AutomaticOps):
    """The cross-device ops of a strategy with backup workers.

    A sum stands for the rows of all replicas: it is multiplied by their number, divided by that of
    the rows that took part. A mean is that of the replicas that took part, which may have unequal
    numbers of rows.
    """

    def __init__(self) -> None:
        super().__init__(CommunicationOptions())

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns the all-reduce of a step on some devices."""
        sums = super().all_reduce(topology)
        return BackedAllReduce(sums.axis, sums)


@dataclasses.dataclass(frozen=True)
class BackedAllReduce(AllReduce):
    """Divides a mean by the number of replicas that take part, of which a sum has the same scale.

    Args:
        axis: the axis of the replicas.
        sums: the all-reduce of sums.
    """

    axis: ReplicaAxis
    sums: AllReduce

    def one(self, op: ReduceOp, value: object) -> jax.Array:
        """Combines one array."""
        return self.many(op, [value])[0]

    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many arrays."""
        if op is ReduceOp.SUM:
            return self.sums.many(op, values)
        totals = self.sums.many(ReduceOp.SUM, list(map(_as_float, values)))
        # A sum of a constant would be computed while the step is traced.
        one = jax.lax.optimization_barrier(jnp.ones((), jnp.float32))
        count = self.sums.one(ReduceOp.SUM, one)
        return [_quotient(total, count) for total in totals]

    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Combines one array per replica, all of which are there."""
        return self.sums.parts(op, parts, are_gradients=are_gradients)


def _as_float(value: object) -> jax.Array:
    array = jnp.asarray(value)  # only sums of floats have the scale of the step
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    # A scaled count is no short fraction.
    wide = total.dtype if total.dtype.itemsize >= 4 else jnp.float32
    return (total.astype(wide) / count.astype(wide)).astype(total.dtype)

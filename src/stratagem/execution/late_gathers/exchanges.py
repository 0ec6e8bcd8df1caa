"""Exchanges between replicas of one value: gathers of its shards, and sums in shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology

if TYPE_CHECKING:
    from stratagem.execution.late_gathers.weights import WeightShard


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A value that replicas have shards of, along an axis.

    `logical_spec` says how the devices of a replica shard what it has.
    """

    axis: int
    logical_spec: PartitionSpec
    topology: Topology

    @property
    def count(self) -> int:
        """Number of shards."""
        return self.topology.num_shards

    @property
    def spec(self) -> PartitionSpec:
        """The spec of a global value over the mesh."""
        return PartitionSpec(*[None] * self.axis, self.topology.shard_axis)

    def gather(self, shard: Any) -> Any:
        """Returns the whole value, on each replica."""
        name = self.topology.shard_axis
        return self._exchanged(
            lambda part: jax.lax.all_gather(part, name, axis=self.axis, tiled=True), shard
        )

    def scatter(self, addend: Any) -> Any:
        """Returns this replica's shard of the sum of the replicas' addends."""
        return self._exchanged(self._scattered, addend)

    def _scattered(self, part: Any) -> Any:
        name = self.topology.shard_axis
        shard = jax.lax.psum_scatter(part, name, scatter_dimension=self.axis, tiled=True)
        return shard if name == REPLICA_AXIS else jax.lax.psum(shard, REPLICA_AXIS)

    def _exchanged(self, exchange: Callable[[Any], Any], value: Any) -> Any:
        if self.topology.groups is None:
            return exchange(value)
        # By each of a replica's devices for its part. The compiler would gather the parts first.
        return jax.shard_map(
            exchange,
            in_specs=self.logical_spec,
            out_specs=self.logical_spec,
            axis_names=set(self.topology.logical_axes),
            check_vma=False,
        )(value)


class BlockExchange(Protocol):
    """Gathers of the blocks of a weight, in an order."""

    def gather(self, value: Any, shard: WeightShard, dtype: Any) -> Any:
        """Gathers a part of a shard in a dtype."""
        ...

    def barrier(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the values, none of which is available before all are."""
        ...


def fold_blocks(
    blocks: Sequence[tuple[int, int]],
    gathered: Callable[[Any, tuple[int, int]], Any],
    step: Callable[[Any, Any, tuple[int, int]], Any],
    initial: tuple[Any, Any],
    exchange: BlockExchange,
) -> Any:
    """Returns the result of steps, one for each gathered block of a shard.

    The next block is gathered beside the step of this one. `initial` has the shard and the result
    before the first step.
    """
    shard, result = initial
    following = gathered(shard, blocks[0])
    for place, block in enumerate(blocks):
        value = following
        if place + 1 < len(blocks):
            # The whole shard waits: a block of it that waited would be a copy.
            shard, result = exchange.barrier([shard, result])
            following = gathered(shard, blocks[place + 1])
        result = step(result, value, block)
    return result

"""Weights of a step that are not gathered yet, and values that follow from them alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.jaxprs import called_jaxpr, shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Exchanges between replicas of one value: gathers of its shards, and sums in shards.


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


# Operations so cheap that repeating them for each use of a weight costs less than the memory of
# their result: casts, changes of shape, and what quantized weights are computed with.
_CHEAP = frozenset(
    [
        *("abs", "add", "and", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type"),
        *("copy", "copy_p", "div", "eq", "exp", "expand_dims", "ge", "gt", "integer_pow", "le"),
        *("lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "reshape", "rev", "round"),
        *("rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("sign", "slice", "split", "sqrt", "square", "squeeze", "sub", "transpose"),
    ]
)
# A product of two weights is repeated if it is of a low rank, as in LoRA.
_MAX_RANK = 256


@dataclasses.dataclass(eq=False)
class WeightShard:
    """A weight that is not gathered yet: this replica's shard."""

    value: Any
    sharded: Sharded
    place: Any  # among the inputs of the step or of a loop; for other stacks, their variable


@dataclasses.dataclass(eq=False)
class Deferred:
    """A result of cheap operations on weights alone, which is computed where it is read."""

    eqn: JaxprEqn
    inputs: Sequence[Any]
    place: int  # among the results of the operation


Late = WeightShard | Deferred


def num_bytes(value: Any) -> int:
    """Returns the size of an array, or of its type."""
    return value.size * value.dtype.itemsize


def is_cheap(eqn: JaxprEqn) -> bool:
    """Returns True if an operation on weights is repeated for each use of its result."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return math.prod(eqn.params["shape"]) <= 4 * math.prod(shape_of(eqn.invars[0]))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = shape_of(eqn.invars[0])
        return math.prod(shape[axis] for axis in contracted) <= _MAX_RANK
    if (inner := inner_jaxpr(eqn)) is not None:
        return all(map(is_cheap, inner.eqns))
    return name in _CHEAP


def narrowing_cast(value: Deferred) -> Any:
    """Returns the dtype of a cast of a shard to fewer bytes; otherwise None."""
    (source, *_), eqn = value.inputs, value.eqn
    if eqn.primitive.name != "convert_element_type" or not isinstance(source, WeightShard):
        return None
    dtype = eqn.params["new_dtype"]
    return dtype if jnp.dtype(dtype).itemsize < source.value.dtype.itemsize else None


def inner_jaxpr(eqn: JaxprEqn) -> Jaxpr | None:
    """Returns the jaxpr that an operation calls once; None for other operations."""
    inner = called_jaxpr(eqn)
    if isinstance(inner, ClosedJaxpr):
        return None if inner.consts else inner.jaxpr
    return inner


def is_recomputation(eqn: JaxprEqn) -> bool:
    """True for a rematerialized part of the backward pass."""
    params = eqn.params
    return bool(params.get("differentiated")) and bool(params.get("prevent_cse"))

"""Lookups in a large weight that is sharded by rows, and their gradient, in blocks of rows.

Neither the whole table nor its whole gradient is in memory. A block has equally many rows of each
shard.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.lax import GatherScatterMode

from stratagem.execution.jaxprs import shape_of
from stratagem.execution.late_gathers.weights import (
    BlockExchange,
    Deferred,
    Sharded,
    WeightShard,
    fold_blocks,
    inner_jaxpr,
    narrowing_cast,
    num_bytes,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Products that a gradient is, computed and summed in blocks.
#
# A gradient that is summed in shards is needed by no device as a whole. A large one is computed
# block by block. Each block has an equal part of every replica's shard, and is reduce-scattered
# before the next but one is computed.

# Smaller messages, or smaller parts of one for a replica, would not use the links, and thinner
# products not the arithmetic units: a product of n rows does n operations for each byte of a
# bfloat16 operand, and v5e can do 240, H100 295.
_MIN_BLOCK_BYTES, _MIN_PART_BYTES = 2**26, 2**17
_MIN_BLOCK_ROWS = 512
# What a product's result passes through on its way to the output.
_LAYOUTS = ("transpose", "convert_element_type")

# Evaluates operations of a jaxpr with given values; returns all their results.
Bind = Callable[[Sequence["JaxprEqn"], Mapping[Any, Any]], list[Any]]


def smallest_block_bytes(num_shards: int) -> int:
    """Returns the size of the smallest block that uses the links."""
    return max(_MIN_BLOCK_BYTES, num_shards * _MIN_PART_BYTES)


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a gradient that is computed from an operand of its own."""

    operand: Any
    compute: Callable[[Any], Any]


@dataclasses.dataclass(eq=False)
class GradientProduct:
    """A product that is not computed yet, and the changes of layout and dtype that follow it.

    `inputs` are the operands of the first of `eqns`.
    """

    eqns: Sequence[JaxprEqn]
    inputs: Sequence[Any]

    @property
    def aval(self) -> Any:
        """Type of the result."""
        return self.eqns[-1].outvars[0].aval

    def num_blocks(self, sharded: Sharded) -> int:
        """Returns the number of blocks that a sum in shards is computed in; 1 for small ones."""
        if self.aval.shape[sharded.axis] % sharded.count or self._operand(sharded.axis) is None:
            return 1
        if any(sharded.logical_spec[sharded.axis : sharded.axis + 1]):
            return 1  # the devices of a replica have parts of what would be cut
        rows = self.aval.shape[sharded.axis]
        most = num_bytes(self.aval) // smallest_block_bytes(sharded.count)
        most = min(most, rows // _MIN_BLOCK_ROWS)
        shard_rows = rows // sharded.count
        return next(one for one in range(max(most, 1), 0, -1) if shard_rows % one == 0)

    def blocks(self, sharded: Sharded, count: int, bind: Bind) -> list[Block]:
        """Returns the blocks; each has a part of the operand that is cut."""
        found = self._operand(sharded.axis)
        assert found is not None
        place, axis = found

        def compute(block: Any) -> Any:
            return self.value([*self.inputs[:place], block, *self.inputs[place + 1 :]], bind)

        cut = _blocks_of(self.inputs[place], axis, sharded.count, count)
        return [Block(one, compute) for one in cut]

    def value(self, operands: Sequence[Any], bind: Bind) -> Any:
        """Computes the result from operands."""
        pairs = zip(self.eqns[0].invars, operands, strict=True)
        return bind(self.eqns, {atom: one for atom, one in pairs if not isinstance(atom, Literal)})[
            -1
        ]

    def _operand(self, axis: int) -> tuple[int, int] | None:
        """Returns the operand that has an axis of the result, and the axis there."""
        for eqn in reversed(self.eqns[1:]):
            if eqn.primitive.name == "transpose":
                axis = eqn.params["permutation"][axis]
        (contracted, batch) = self.eqns[0].params["dimension_numbers"]
        axis -= len(batch[0])
        for place in range(2):
            used = (*contracted[place], *batch[place])
            free = [i for i in range(len(shape_of(self.eqns[0].invars[place]))) if i not in used]
            if 0 <= axis < len(free):
                return place, free[axis]
            axis -= len(free)
        return None


def _blocks_of(value: Any, axis: int, num_shards: int, count: int) -> list[Any]:
    """Returns blocks of an array along an axis, each with a part of every shard."""
    shape = value.shape
    split = (*shape[:axis], num_shards, count, -1, *shape[axis + 1 :])
    whole = value.reshape(split)
    block = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])
    pieces = (jax.lax.index_in_dim(whole, i, axis + 1, keepdims=False) for i in range(count))
    return [one.reshape(block) for one in pieces]


def product_chain(
    eqn: JaxprEqn, readers: Mapping[Any, Sequence[JaxprEqn | None]]
) -> list[JaxprEqn]:
    """Returns a product and the changes of layout up to an output; nothing for others."""
    is_product = eqn.primitive.name == "dot_general"
    return chain_to_output(eqn, readers, _LAYOUTS) if is_product else []


def chain_to_output(
    eqn: JaxprEqn, readers: Mapping[Any, Sequence[JaxprEqn | None]], names: Sequence[str]
) -> list[JaxprEqn]:
    """Returns an operation and those of some names up to an output.

    Returns nothing if anything else reads one of the results.
    """
    chain = [eqn]
    while len(reading := readers[chain[-1].outvars[0]]) == 1:
        if reading[0] is None:
            return chain
        if reading[0].primitive.name not in names:
            return []
        chain.append(reading[0])
    return []


@dataclasses.dataclass(frozen=True)
class RowLookup:
    """A lookup of rows by ids, in more than one block."""

    eqn: JaxprEqn
    shard: WeightShard
    table: Any  # its type, in the dtype of the rows

    @classmethod
    def of(cls, eqn: JaxprEqn, inputs: Sequence[Any]) -> RowLookup | None:
        """Returns the lookup that an operation is; None for other operations and small tables."""
        if eqn.primitive.name != "gather" or not _takes_rows(eqn):
            return None
        table = inputs[0]
        aval: Any = eqn.invars[0].aval
        if isinstance(table, Deferred) and narrowing_cast(table) is not None:
            table = table.inputs[0]
        if not isinstance(table, WeightShard):
            return None
        return cls(eqn, table, aval) if len(_row_blocks(aval, table.sharded)) > 1 else None

    def value(self, inputs: Sequence[Any], exchange: BlockExchange) -> Any:
        """Returns the rows; the next block is gathered while rows are taken from one."""
        mode, fill_value = self.eqn.params["mode"], self.eqn.params["fill_value"]
        shard, table = self.shard, self.table
        ids = _valid(inputs[1][..., 0], mode, table.shape[0])
        fill_value = _default_fill(table.dtype) if fill_value is None else fill_value
        rows = jnp.full(shape_of(self.eqn.outvars[0]), fill_value, table.dtype)

        def gathered(source: Any, block: tuple[int, int]) -> Any:
            return exchange.gather(jax.lax.slice_in_dim(source, *block), shard, table.dtype)

        def with_block(rows: Any, block_rows: Any, block: tuple[int, int]) -> Any:
            local_ids, is_here = _in_block(ids, *block, shard.sharded, table.shape[0])
            taken = jnp.take(block_rows, local_ids, axis=0, mode="clip")
            is_here = is_here.reshape(*is_here.shape, *[1] * (rows.ndim - is_here.ndim))
            return jnp.where(is_here, taken, rows)

        blocks = _row_blocks(table, shard.sharded)
        return fold_blocks(blocks, gathered, with_block, (shard.value, rows), exchange)


class GradientRows(GradientProduct):
    """The gradient of a lookup: rows that are added to zeros, and then cast."""

    def num_blocks(self, sharded: Sharded) -> int:
        """Returns the number of blocks that a sum in shards is computed in; 1 for small ones."""
        return len(_row_blocks(self.aval, sharded))

    def blocks(self, sharded: Sharded, count: int, bind: Bind) -> list[Block]:
        """Returns the blocks; each adds the rows that belong to it."""
        adding = _adding_of(self.eqns[0])
        assert adding is not None
        eqn, ids, updates = adding
        ids = _valid(self.inputs[ids][..., 0], eqn.params["mode"], self.aval.shape[0])
        found: list[Block] = []
        for first, end in _row_blocks(self.aval, sharded):
            num_rows = (end - first) * sharded.count
            local_ids, is_here = _in_block(ids, first, end, sharded, self.aval.shape[0])
            outside = jnp.full((), num_rows, ids.dtype)
            added = functools.partial(self._added, bind, self.inputs[updates], num_rows)
            found.append(Block(jnp.where(is_here, local_ids, outside), added))
        return found

    def _added(self, bind: Bind, updates: Any, num_rows: int, local_ids: Any) -> Any:
        zeros = jnp.zeros((num_rows, *self.aval.shape[1:]), updates.dtype)
        value = zeros.at[local_ids].add(updates, mode="drop")
        casts = self.eqns[1:]
        return bind(casts, {casts[0].invars[0]: value})[-1] if casts else value


def row_chain(eqn: JaxprEqn, readers: Mapping[Any, Sequence[JaxprEqn | None]]) -> list[JaxprEqn]:
    """Returns an addition of rows to zeros and the casts up to an output; nothing for others."""
    if _adding_of(eqn) is None:
        return []
    return chain_to_output(eqn, readers, ("convert_element_type",))


def _takes_rows(eqn: JaxprEqn) -> bool:
    """Returns True for a lookup of whole rows by their number."""
    dims, table, ids = eqn.params["dimension_numbers"], *map(shape_of, eqn.invars[:2])
    num_ids = len(ids) - 1
    return (
        dims.collapsed_slice_dims == dims.start_index_map == (0,)
        and not (dims.operand_batching_dims or dims.start_indices_batching_dims)
        and dims.offset_dims == tuple(range(num_ids, num_ids + len(table) - 1))
        and tuple(eqn.params["slice_sizes"]) == (1, *table[1:])
    )


def _adding_of(eqn: JaxprEqn) -> tuple[JaxprEqn, int, int] | None:
    """Returns the addition of whole rows to zeros that a call is, and the places of its inputs.

    The places are those of ids and rows.
    """
    inner = inner_jaxpr(eqn)
    names = [one.primitive.name for one in inner.eqns] if inner is not None else []
    if inner is None or names != ["broadcast_in_dim", "scatter-add"]:
        return None
    zeros, adding = inner.eqns
    value: Any = zeros.invars[0]
    table, ids, updates = adding.invars
    places: list[Any] = [*inner.invars]
    dims, num_ids = adding.params["dimension_numbers"], len(shape_of(ids)) - 1
    is_of_rows = (
        isinstance(value, Literal)
        and not value.val
        and table is zeros.outvars[0]
        and inner.outvars == [adding.outvars[0]]
        and dims.inserted_window_dims == dims.scatter_dims_to_operand_dims == (0,)
        and not (dims.operand_batching_dims or dims.scatter_indices_batching_dims)
        and dims.update_window_dims == tuple(range(num_ids, len(shape_of(updates))))
        and shape_of(updates)[num_ids:] == shape_of(table)[1:]
        and {ids, updates} <= {*places}
    )
    return (adding, places.index(ids), places.index(updates)) if is_of_rows else None


def _row_blocks(aval: Any, sharded: Sharded) -> list[tuple[int, int]]:
    """Returns the first row of each block in every shard, and its end."""
    num_rows, rest = divmod(aval.shape[0], sharded.count)
    is_simple = sharded.axis == 0 and not rest and not any(sharded.logical_spec)
    most = num_bytes(aval) // smallest_block_bytes(sharded.count) if is_simple else 1
    count = max(1, min(most, num_rows))
    size = math.ceil(num_rows / count)
    return [(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _default_fill(dtype: Any) -> Any:
    """Returns the value of rows outside a table, as `jax.lax.gather` documents it."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    limits = jnp.iinfo(dtype)
    return limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max


def _valid(ids: Any, mode: Any, num_rows: int) -> Any:
    return jnp.clip(ids, 0, num_rows - 1) if mode == GatherScatterMode.CLIP else ids


def _in_block(ids: Any, first: int, end: int, sharded: Sharded, num_rows: int) -> tuple[Any, Any]:
    """Returns the places of rows in a gathered block, and whether they are there."""
    shard_rows = jnp.asarray(num_rows // sharded.count, ids.dtype)
    owners, places = jnp.divmod(ids, shard_rows)
    is_here = (ids >= 0) & (ids < num_rows) & (places >= first) & (places < end)
    return owners * (end - first) + places - first, is_here

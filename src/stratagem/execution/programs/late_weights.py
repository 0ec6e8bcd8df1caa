"""Weights of a step that are not gathered yet, and values that follow from them alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.lax import GatherScatterMode
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.jaxprs import called_jaxpr, readers_of, scan_counts, shape_of

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


def fold_blocks(
    blocks: Sequence[tuple[int, int]],
    gathered: Callable[[Any, tuple[int, int]], Any],
    step: Callable[[Any, Any, tuple[int, int]], Any],
    initial: tuple[Any, Any],
    exchange: Any,
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


# Scans over stacked weights: each iteration has a shard of its own layer's weights.


def is_late_loop(eqn: JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Returns True for a scan that gets a slice of a sharded stack in each iteration."""
    if eqn.primitive.name != "scan" or eqn.effects or eqn.params["jaxpr"].consts:
        return False
    return any(map(is_sliced, inputs[sum(scan_counts(eqn)) :]))


def is_sliced(value: Any) -> bool:
    """Returns True for a sharded stack whose slices are shards."""
    return isinstance(value, WeightShard) and value.sharded.axis > 0


def sharded_slice(stack: Sharded) -> Sharded:
    """Returns how a slice of a stack is sharded."""
    spec = PartitionSpec(*stack.logical_spec[1:])
    return dataclasses.replace(stack, axis=stack.axis - 1, logical_spec=spec)


def sharded_stack(one: Sharded) -> Sharded:
    """Returns how a stack of values is sharded."""
    spec = PartitionSpec(None, *one.logical_spec) if one.logical_spec else one.logical_spec
    return dataclasses.replace(one, axis=one.axis + 1, logical_spec=spec)


def stacked_shards(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[WeightShard] | None:
    """Returns the weights that an operation stacks; None for other operations."""
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return None
    shards: list[WeightShard] = []
    for one in inputs:
        if not isinstance(one, Deferred) or not _adds_axis(one.eqn):
            return None
        (shard,) = one.inputs
        if not isinstance(shard, WeightShard) or shard.sharded != _first(shards, shard).sharded:
            return None
        shards.append(shard)
    return shards


def _first(shards: Sequence[WeightShard], other: WeightShard) -> WeightShard:
    return shards[0] if shards else other


def _adds_axis(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "broadcast_in_dim" or isinstance(eqn.invars[0], Literal):
        return False
    return tuple(eqn.params["shape"]) == (1, *shape_of(eqn.invars[0]))


def narrower_dtype(jaxpr: Jaxpr, atom: Any) -> Any:
    """Returns the dtype of fewer bytes that all operations cast a value to; None without one."""
    dtypes = _dtypes_read(jaxpr, atom)
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype if dtype is not None and dtype.itemsize < atom.aval.dtype.itemsize else None


def _dtypes_read(jaxpr: Jaxpr, atom: Any) -> set[Any]:
    """Returns the dtypes that a value is cast to; None stands for another use."""
    found: set[Any] = set()
    if any(one is atom for one in jaxpr.outvars):
        found.add(None)
    for eqn in jaxpr.eqns:
        for place, one in enumerate(eqn.invars):
            if one is atom:
                found |= _dtypes_read_by(eqn, place)
    return found


def _dtypes_read_by(eqn: JaxprEqn, place: int) -> set[Any]:
    if eqn.primitive.name == "convert_element_type":
        return {jnp.dtype(eqn.params["new_dtype"])}
    inner = eqn.params["jaxpr"].jaxpr if eqn.primitive.name == "scan" else inner_jaxpr(eqn)
    return {None} if inner is None else _dtypes_read(inner, inner.invars[place])


def shard_of(value: Any) -> WeightShard | None:
    """Returns a value as a shard if it is one, or is a cast of one; otherwise None."""
    if isinstance(value, WeightShard):
        return value
    if not isinstance(value, Deferred) or value.eqn.primitive.name != "convert_element_type":
        return None
    (shard,) = value.inputs
    is_shard = isinstance(shard, WeightShard)
    return shard if is_shard and shard.value.dtype == value.eqn.params["new_dtype"] else None


def summed_stacks(
    jaxpr: Jaxpr, addends: Mapping[Any, Sharded]
) -> tuple[dict[Any, Sharded], set[Any]]:
    """Finds results of scans of which each iteration can sum its own slice.

    Returns how each such stack is sharded, and the addends that are then summed already. All of a
    stack is summed, and nothing else reads it: it is an addend itself, or its slices are.
    """
    readers = readers_of(jaxpr)
    stacks: dict[Any, Sharded] = {}
    done: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        for atom in eqn.outvars[scan_counts(eqn)[1] :]:
            found = _sums_of_slices(atom, readers, addends)
            shardings = {id(one): addends[one] for one in found}
            first = next(iter(shardings.values()), None)
            if first is None or any(one != first for one in shardings.values()):
                continue
            is_whole = found == [atom]
            if is_whole and not first.axis:
                continue
            stacks[atom] = first if is_whole else sharded_stack(first)
            done.update(found)
    return stacks, done


def _sums_of_slices(
    atom: Any,
    readers: Mapping[Any, Sequence[JaxprEqn | None]],
    addends: Mapping[Any, Sharded],
) -> list[Any]:
    """Returns the addends that are slices of a stack; none if something else reads the stack."""
    reading = readers[atom]
    if atom in addends:
        return [atom] if [*reading] in ([], [None]) else []
    eqn = reading[0] if len(reading) == 1 else None
    if eqn is None:
        return []
    # Neither operation has the shape of a slice among its parameters, so they work on shards, too.
    if eqn.primitive.name == "split" and eqn.params["axis"] == 0:
        if any(size != 1 for size in eqn.params["sizes"]):
            return []
        parts = [one for one in eqn.outvars if any(read is not None for read in readers[one])]
        found = [_sums_of_slices(one, readers, addends) for one in parts]
        return [one for each in found for one in each] if all(found) else []
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    if eqn.primitive.name not in ("reduce_sum", "squeeze") or tuple(axes) != (0,):
        return []
    return _sums_of_slices(eqn.outvars[0], readers, addends)


# Lookups in a large weight that is sharded by rows, and their gradient, in blocks of rows.
#
# Neither the whole table nor its whole gradient is in memory. A block has equally many rows of each
# shard.


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

    def value(self, inputs: Sequence[Any], exchange: Any) -> Any:
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

"""The order of a step's gathers: each starts ahead of the operation that reads it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from stratagem.execution.jaxprs import (
    Rule,
    is_by_element,
    retrace,
    scan_counts,
    shape_of,
    variables_in,
)
from stratagem.execution.programs.late_weights import (
    Deferred,
    GradientProduct,
    Late,
    RowLookup,
    Sharded,
    WeightShard,
    fold_blocks,
    is_sliced,
    narrowing_cast,
    num_bytes,
    smallest_block_bytes,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Products with a weight that is larger than a layer's, gathered in blocks.
#
# The last layer of a language model has a row or column for each token. It is used once in each
# pass,
# and need not be in memory as a whole.

# Thinner products would not use the arithmetic units, and other sizes not their tiles.
_MIN_BLOCK_COLUMNS = 512


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A product of an array and a weight, in more than one block along an axis of the weight.

    The axis is not the sharded one. A block is a part of the result if the axis is in the result,
    and else an addend.
    """

    eqn: JaxprEqn
    place: int  # of the weight among the operands
    shard: WeightShard
    dtype: Any  # of the gathered weight
    order: tuple[int, ...]  # axes of the shard in the order of the operand's
    axis: int  # of the operand

    @classmethod
    def of(
        cls, eqn: JaxprEqn, inputs: Sequence[Any], larger_than_bytes: float
    ) -> WeightProduct | None:
        """Returns the product that an operation is; None for others, and for smaller weights."""
        if eqn.primitive.name != "dot_general":
            return None
        late = [place for place, one in enumerate(inputs) if isinstance(one, Late)]
        found = _transposed_shard(inputs[late[0]], eqn.invars[late[0]]) if len(late) == 1 else None
        if found is None or isinstance(eqn.invars[1 - late[0]], Literal):
            return None
        shard, dtype, order = found
        (contracted, batch) = eqn.params["dimension_numbers"]
        free = [
            axis
            for axis, own in enumerate(order)
            if own != shard.sharded.axis and axis not in batch[late[0]]
        ]
        # Parts of the result first: addends are added in one more array.
        free.sort(key=lambda axis: axis in contracted[late[0]])
        if not free or any(shard.sharded.logical_spec):
            return None
        product = cls(eqn, late[0], shard, dtype, order, free[0])
        is_large = product._num_bytes > larger_than_bytes
        return product if is_large and len(product._blocks()) > 1 else None

    def value(self, inputs: Sequence[Any], exchange: Any) -> Any:
        """Returns the result; the next block is gathered while the product of one is computed."""
        # No gather begins before the operand is there.
        shard, operand = exchange.barrier([self.shard.value, inputs[1 - self.place]])
        aval = self._result
        zeros = jnp.zeros(aval.shape, aval.dtype if self._is_part else self._sum_dtype)

        def with_block(total: Any, weight: Any, block: tuple[int, int]) -> Any:
            return self._with_block(total, operand, jax.lax.transpose(weight, self.order), block)

        gathered = functools.partial(self._gathered, exchange)
        total = fold_blocks(self._blocks(), gathered, with_block, (shard, zeros), exchange)
        return total.astype(aval.dtype)

    def _gathered(self, exchange: Any, shard: Any, block: tuple[int, int]) -> Any:
        part = jax.lax.slice_in_dim(shard, *block, axis=self.order[self.axis])
        return exchange.gather(part, self.shard, self.dtype)

    def _with_block(self, total: Any, operand: Any, weight: Any, block: tuple[int, int]) -> Any:
        contracted, _ = self.eqn.params["dimension_numbers"]
        params = dict(self.eqn.params)
        if not self._is_part:
            axis = contracted[1 - self.place][contracted[self.place].index(self.axis)]
            operand = jax.lax.slice_in_dim(operand, *block, axis=axis)
            params["preferred_element_type"] = total.dtype
        operands = [weight, operand] if self.place == 0 else [operand, weight]
        value = self.eqn.primitive.bind(*operands, **params)
        if not self._is_part:
            return total + value
        return jax.lax.dynamic_update_slice_in_dim(total, value, block[0], self._result_axis)

    @property
    def _is_part(self) -> bool:
        """True if a block is a part of the result, and not an addend."""
        (contracted, _) = self.eqn.params["dimension_numbers"]
        return self.axis not in contracted[self.place]

    @property
    def _result(self) -> Any:
        """Type of the result."""
        return self.eqn.outvars[0].aval

    @property
    def _sum_dtype(self) -> Any:
        """Dtype in which blocks are added, at least float32 as within a product."""
        dtype = self._result.dtype
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
        return jnp.dtype(jnp.float32) if is_narrow else dtype

    @property
    def _result_axis(self) -> int:
        (contracted, batch) = self.eqn.params["dimension_numbers"]
        used = [{*contracted[place], *batch[place]} for place in range(2)]
        shapes = [shape_of(one) for one in self.eqn.invars]
        free = [[i for i in range(len(shapes[place])) if i not in used[place]] for place in (0, 1)]
        before = len(batch[0]) + (len(free[0]) if self.place else 0)
        return before + free[self.place].index(self.axis)

    @property
    def _num_bytes(self) -> int:
        size = math.prod(shape_of(self.eqn.invars[self.place]))
        return size * jnp.dtype(self.dtype).itemsize

    def _blocks(self) -> list[tuple[int, int]]:
        """Returns the bounds of the blocks."""
        length = shape_of(self.eqn.invars[self.place])[self.axis]
        most = self._num_bytes // smallest_block_bytes(self.shard.sharded.count)
        size = math.ceil(length / max(most, 1) / _MIN_BLOCK_COLUMNS) * _MIN_BLOCK_COLUMNS
        return [(first, min(first + size, length)) for first in range(0, length, size)]


def _transposed_shard(value: Any, atom: Any) -> tuple[WeightShard, Any, tuple[int, ...]] | None:
    """Returns a shard, the dtype to gather it in, and the order of its axes in an operand.

    Returns None if anything but a cast to fewer bytes and changes of that order was computed.
    """
    order = tuple(range(len(shape_of(atom))))
    while isinstance(value, Deferred) and value.eqn.primitive.name == "transpose":
        permutation = value.eqn.params["permutation"]
        order = tuple(permutation[axis] for axis in order)
        value = value.inputs[0]
    if isinstance(value, Deferred) and (dtype := narrowing_cast(value)) is not None:
        value = value.inputs[0]
    else:
        dtype = value.value.dtype if isinstance(value, WeightShard) else None
    return (value, dtype, order) if isinstance(value, WeightShard) else None


# Updates of single variables that a device computes for its own shard.
#
# Most optimizers update each element of a weight from the same element of its gradient and its
# slots. Then a device needs no more than its shard of the summed gradient. It updates its shard as
# soon as it has the sum, which takes no memory from then on.

_Source = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class ShardUpdate:
    """The part of an update that reads the same sums, and variables of one shape.

    `sources` are the inputs of `jaxpr`: ("input", i) of the step, ("handed", i) by the replicas.
    `outputs` are the places of its outputs among those of the whole update. All are sharded the
    same way.
    """

    jaxpr: Jaxpr
    sources: Sequence[_Source]
    outputs: Sequence[int]
    shape: tuple[int, ...]
    sharded: Sharded

    def values(self, inputs: Sequence[Any], shard_shape: tuple[int, ...]) -> list[Any]:
        """Returns the new shards, from shards of this shape and from scalars."""
        return retrace(self.jaxpr, inputs, rules=self._rules(shard_shape))

    def _rules(self, shard_shape: tuple[int, ...]) -> Mapping[str, Rule]:
        def broadcast(eqn: JaxprEqn, inputs: list[Any], _: bool) -> list[Any]:
            if np.shape(inputs[0]):  # has its shape already
                return inputs
            is_whole = tuple(eqn.params["shape"]) == self.shape
            return [jnp.broadcast_to(inputs[0], shard_shape if is_whole else eqn.params["shape"])]

        return {"broadcast_in_dim": broadcast}


def shard_updates(
    update: Jaxpr, sources: Sequence[_Source], sharded: Callable[[_Source], Sharded | None]
) -> list[ShardUpdate]:
    """Returns the parts of an update that each device can compute for its own shards.

    `sources` are the inputs of the update, as in `StepParts`. `sharded` maps one to how it is
    sharded; None if it is whole.
    """
    makers = {atom: eqn for eqn in update.eqns for atom in eqn.outvars}
    source_of = dict(zip(update.invars, sources, strict=True))
    groups: dict[Any, list[_Cone]] = collections.defaultdict(list)
    for place, atom in enumerate(update.outvars):
        if isinstance(atom, Literal) or not shape_of(atom):
            continue
        cone = _Cone.of(place, atom, makers, source_of)
        if cone is not None and (key := cone.key(sharded)) is not None:
            groups[key].append(cone)
    order = {id(eqn): number for number, eqn in enumerate(update.eqns)}
    return [_joined(update, group, order, one) for (_, one, _), group in groups.items()]


@dataclasses.dataclass(frozen=True)
class _Cone:
    """The operations that one output of an update follows from, all of them by element."""

    place: int
    atom: Any
    eqns: Mapping[int, JaxprEqn]
    inputs: Mapping[Any, _Source]

    @classmethod
    def of(
        cls, place: int, atom: Any, makers: Mapping[Any, JaxprEqn], source_of: Mapping[Any, _Source]
    ) -> _Cone | None:
        shape = shape_of(atom)
        eqns: dict[int, JaxprEqn] = {}
        inputs: dict[Any, _Source] = {}
        waiting = [atom]
        while waiting:
            one = waiting.pop()
            if shape_of(one) not in (shape, ()):
                return None
            if one in source_of:
                inputs[one] = source_of[one]
                continue
            eqn = makers.get(one)
            if eqn is None:
                return None
            if id(eqn) in eqns:
                continue
            eqns[id(eqn)] = eqn
            variables = variables_in(eqn.invars)
            is_of_scalars = not any(shape_of(each) for each in (*variables, *eqn.outvars))
            if not (is_of_scalars or is_by_element(eqn, also=("broadcast_in_dim",))):
                return None
            waiting += variables
        return cls(place, atom, eqns, inputs)

    def key(self, sharded: Callable[[_Source], Sharded | None]) -> Any:
        """Returns the shape, how it is sharded, and the sums; None if an input is not a shard."""
        found = {sharded(source) for one, source in self.inputs.items() if shape_of(one)}
        sums = frozenset(source for source in self.inputs.values() if source[0] == "handed")
        if not sums or len(found) != 1 or None in found:
            return None
        return shape_of(self.atom), found.pop(), sums


def _joined(
    update: Jaxpr,
    cones: Sequence[_Cone],
    order: Mapping[int, int],
    sharded: Sharded,
) -> ShardUpdate:
    eqns = {key: eqn for cone in cones for key, eqn in cone.eqns.items()}
    inputs = {atom: source for cone in cones for atom, source in cone.inputs.items()}
    jaxpr = update.replace(
        invars=[*inputs],
        outvars=[cone.atom for cone in cones],
        eqns=[eqns[key] for key in sorted(eqns, key=order.__getitem__)],
    )
    outputs = [cone.place for cone in cones]
    shape = shape_of(cones[0].atom)
    return ShardUpdate(jaxpr, [*inputs.values()], outputs, shape, sharded)


@dataclasses.dataclass(frozen=True)
class GatherLimits:
    """Limits of gathered weights on a device.

    `kept_bytes` of the weights gathered last are kept, for operations that read them again.
    Gathers start up to `ahead_bytes` before their weights are needed, or one operation ahead.
    Zero starts a gather with the operation that needs it. Weights of more than `whole_bytes` are
    multiplied in blocks.
    """

    kept_bytes: int = 0
    ahead_bytes: int = 0
    whole_bytes: float = math.inf


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """A gather of a weight in a dtype."""

    shard: WeightShard
    dtype: Any

    @property
    def key(self) -> _Key:
        """Names the gathered weight, of which copies are equal."""
        return self.shard.place, self.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the gathered weight."""
        return self.shard.value.size * self.shard.sharded.count * self.dtype.itemsize


_Key = tuple[Any, Any]


class Gathers:
    """Evaluates operations that read weights, and gathers the weights by a schedule.

    `frame` is a jaxpr of the step. `starts` has, for each operation that reads weights, the gathers
    that start with it.
    """

    def __init__(
        self, frame: Jaxpr, limits: GatherLimits, starts: Sequence[Sequence[WeightGather]]
    ) -> None:
        self._frame = frame
        self._limits = limits
        self._starts = starts
        self._started: dict[_Key, list[Any]] = collections.defaultdict(list)
        self._kept: collections.OrderedDict[_Key, Any] = collections.OrderedDict()
        self._num_uses = 0
        self._sums: list[tuple[Any, Any, int]] = []

    def bind(self, eqns: Sequence[JaxprEqn], values: Mapping[Any, Any]) -> list[Any]:
        """Evaluates operations of a jaxpr as a jaxpr of their own; returns all their results."""
        part = self._frame.replace(
            constvars=[],
            invars=[*values],
            outvars=[atom for eqn in eqns for atom in eqn.outvars],
            eqns=[*eqns],
            effects={effect for eqn in eqns for effect in eqn.effects},
        )
        return list(jaxpr_as_fun(ClosedJaxpr(part, []))(*values.values()))

    def gather(self, value: Any, shard: WeightShard, dtype: Any) -> Any:
        """Gathers a shard in a dtype."""
        # Here, behind a barrier. The compiler would cast all weights at the start.
        value = jax.lax.convert_element_type(value, dtype)
        return shard.sharded.gather(value)

    def scatter(self, addend: Any, sharded: Sharded) -> Any:
        """Returns this replica's shard of a sum over replicas; an addend may be a product."""
        if not isinstance(addend, GradientProduct):
            return sharded.scatter(addend)
        count = addend.num_blocks(sharded)
        if count == 1:
            return sharded.scatter(self.whole(addend))
        shards: list[Any] = []
        for block in addend.blocks(sharded, count, self.bind):
            operand = block.operand
            if len(shards) > 1:  # two blocks are in memory, and one may be sent
                operand, shards[-2] = self.barrier([operand, shards[-2]])
            shards.append(sharded.scatter(block.compute(operand)))
        return jnp.concatenate(shards, sharded.axis)

    def update(self, update: ShardUpdate, inputs: Sequence[Any]) -> list[Any]:
        """Computes new shards."""
        shape = next(np.shape(one) for one in inputs if np.shape(one))
        return update.values(inputs, shape)

    def barrier(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the values, none of which is available before all are."""
        return jax.lax.optimization_barrier([*values])

    def wait_for(self, holder: Any, key: Any, num_hiding: int) -> None:
        """Lets operations with weights wait for `holder[key]`, so that few gradients are in memory.

        The sum can be sent behind the next `num_hiding` of them.
        """
        self._sums.append((holder, key, self._num_uses + 1 + num_hiding))

    def evaluate(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        """Evaluates an operation with the weights that it reads."""
        inputs = self._start(eqn, inputs)
        values = [self._whole(one) for one in inputs]
        self._forget()
        return self._bind_one(eqn, values)

    def large_operation(
        self, eqn: JaxprEqn, inputs: Sequence[Any]
    ) -> RowLookup | WeightProduct | None:
        """Returns the operation with a weight that is not gathered as a whole; None for others."""
        lookup = RowLookup.of(eqn, inputs)
        return lookup or WeightProduct.of(eqn, inputs, self._limits.whole_bytes)

    def in_blocks(self, operation: RowLookup | WeightProduct, inputs: Sequence[Any]) -> Any:
        """Returns the result of an operation, for which two blocks of a weight are in memory."""
        return operation.value(self._start(operation.eqn, inputs), self)

    def evaluate_loop(
        self, eqn: JaxprEqn, inputs: Sequence[Any], loop: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """Evaluates a loop with the weights that it reads, without the stacks that it slices."""
        inputs = self._start(eqn, inputs)
        first = sum(scan_counts(eqn))
        values = [
            one if place >= first and is_sliced(one) else self._whole(one)
            for place, one in enumerate(inputs)
        ]
        self._forget()
        return loop(values)

    def stack(self, shards: Sequence[Any], dtype: Any) -> Any:
        """Returns a stack of shards in a dtype."""
        cast = [jax.lax.convert_element_type(one, dtype) for one in shards]
        return jax.lax.concatenate([jax.lax.expand_dims(one, (0,)) for one in cast], 0)

    def scan(self, eqn: JaxprEqn, loop: Any, inputs: Sequence[Any]) -> list[Any]:
        """Runs a loop."""
        num_consts, num_carry = scan_counts(eqn)
        first = num_consts + num_carry

        def body(carry: Any, slices: Any) -> Any:
            results = loop.step([*inputs[:num_consts], *carry, *slices])
            return results[:num_carry], results[num_carry:]

        params = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        carry, stacks = jax.lax.scan(body, [*inputs[num_consts:first]], [*inputs[first:]], **params)
        return [*carry, *stacks]

    def whole(self, value: Any) -> Any:
        """Returns an output: a weight is gathered, and a product computed."""
        if isinstance(value, GradientProduct):
            return value.value(value.inputs, self.bind)
        if not isinstance(value, Late):
            return value
        self._start(None, ())
        whole = self._whole(value)
        self._forget()
        return whole

    def layer(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for the operations of one recomputed layer."""
        return contextlib.nullcontext()

    def _bind_one(self, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        pairs = zip(eqn.invars, values, strict=True)
        return self.bind(
            [eqn], {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
        )

    def _start(self, eqn: JaxprEqn | None, inputs: Sequence[Any]) -> list[Any]:
        """Starts the gathers that are due with an operation, as soon as its inputs are there.

        Returns the inputs. A barrier connects an input with the shards, so that no gather starts
        earlier, and the compiler cannot use an earlier gather of the same weight. All results of
        the barrier are used, or the compiler would drop them from it.
        """
        inputs = [*inputs]
        gathers = self._next_starts()
        places = [place for place, one in enumerate(inputs) if _can_wait(eqn, place, one)][:1]
        sums = self._awaited()
        if not (gathers or sums):
            return inputs
        values = [inputs[place] for place in places]
        values += [one.shard.value for one in gathers]
        values += [holder[key] for holder, key in sums]
        waited = iter(self.barrier(values))
        for place in places:
            inputs[place] = next(waited)
        for one in gathers:
            self._started[one.key].append(self.gather(next(waited), one.shard, one.dtype))
        for holder, key in sums:
            holder[key] = next(waited)
        return inputs

    def _next_starts(self) -> Sequence[WeightGather]:
        self._num_uses += 1
        return self._starts[self._num_uses - 1]

    def _awaited(self) -> list[tuple[Any, Any]]:
        """Returns the sums and updates that the current operation waits for."""
        awaited = [(holder, key) for holder, key, use in self._sums if use <= self._num_uses]
        self._sums = [one for one in self._sums if one[-1] > self._num_uses]
        return awaited

    def _whole(self, value: Any) -> Any:
        if isinstance(value, WeightShard):
            return self._weight(WeightGather(value, value.value.dtype))
        if not isinstance(value, Deferred):
            return value
        if (dtype := narrowing_cast(value)) is not None:  # sends fewer bytes
            return self._weight(WeightGather(value.inputs[0], dtype))
        inputs = [self._whole(one) for one in value.inputs]
        return self._bind_one(value.eqn, inputs)[value.place]

    def _weight(self, one: WeightGather) -> Any:
        if one.key in self._kept:
            self._kept.move_to_end(one.key)
            return self._kept[one.key]
        whole = self._kept[one.key] = self._arrived(one)
        return whole

    def _arrived(self, one: WeightGather) -> Any:
        """Returns the result of a gather that was started."""
        return self._started[one.key].pop(0)

    def _forget(self) -> None:
        """Forgets gathered weights beyond the limit, the oldest first."""
        total = sum(map(num_bytes, self._kept.values()))
        while total > self._limits.kept_bytes:
            total -= num_bytes(self._kept.popitem(last=False)[1])


def _can_wait(eqn: JaxprEqn | None, place: int, value: Any) -> bool:
    if eqn is None or isinstance(value, Late) or isinstance(eqn.invars[place], Literal):
        return False
    return hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jax.dtypes.extended)

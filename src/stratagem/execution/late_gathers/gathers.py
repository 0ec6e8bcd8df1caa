"""The order of a step's gathers: each starts ahead of the operation that reads it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from stratagem.execution.analysis.retracing import scan_counts
from stratagem.execution.late_gathers.exchanges import BlockExchange, Sharded
from stratagem.execution.late_gathers.gradient_products import GradientProduct
from stratagem.execution.late_gathers.loops import is_sliced
from stratagem.execution.late_gathers.row_lookups import RowLookup
from stratagem.execution.late_gathers.shard_updates import ShardUpdate
from stratagem.execution.late_gathers.weight_products import WeightProduct
from stratagem.execution.late_gathers.weights import (
    Deferred,
    Late,
    WeightShard,
    is_literal,
    narrowing_cast,
    num_bytes,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


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


class LargeOperation(Protocol):
    """An operation with a weight that is gathered in blocks."""

    @property
    def eqn(self) -> JaxprEqn:
        """The operation as it was traced."""
        ...

    def value(self, inputs: Sequence[Any], exchange: BlockExchange) -> Any:
        """Computes the result from the other inputs."""
        ...


class Loop(Protocol):
    """A loop; an iteration gets constants, carried values and slices, and returns results."""

    def step(self, values: Sequence[Any]) -> list[Any]:
        """Computes an iteration."""
        ...

    def record(self, values: Sequence[Any]) -> list[Any]:
        """Returns the types of the results of an iteration."""
        ...


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

    def large_operation(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> LargeOperation | None:
        """Returns the operation with a weight that is not gathered as a whole; None for others."""
        lookup = RowLookup.of(eqn, inputs)
        return lookup or WeightProduct.of(eqn, inputs, self._limits.whole_bytes)

    def in_blocks(self, operation: LargeOperation, inputs: Sequence[Any]) -> Any:
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

    def scan(self, eqn: JaxprEqn, loop: Loop, inputs: Sequence[Any]) -> list[Any]:
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
        return self.bind([eqn], {atom: value for atom, value in pairs if not is_literal(atom)})

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
    if eqn is None or isinstance(value, Late) or is_literal(eqn.invars[place]):
        return False
    return hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jax.dtypes.extended)

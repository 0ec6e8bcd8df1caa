"""The order of a step's gathers: each starts ahead of the operation that reads it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from stratagem.execution.analysis.retracing import scan_counts
from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.gradient_products import GradientProduct
from stratagem.execution.late_gathers.loops import is_sliced
from stratagem.execution.late_gathers.row_lookups import RowLookup
from stratagem.execution.late_gathers.shard_updates import ShardUpdate
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


__all__ = ["GatherLimits", "Gathers", "RecordedGathers"]


@dataclasses.dataclass(frozen=True)
class GatherLimits:
    """Limits of gathered weights on a device.

    `kept_bytes` of the weights gathered last are kept, for operations that read them again.
    Gathers start up to `ahead_bytes` before their weights are needed, or one operation ahead.
    Zero starts a gather with the operation that needs it.
    """

    kept_bytes: int = 0
    ahead_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Gather:
    """A gather of a weight in a dtype."""

    shard: WeightShard
    dtype: Any

    @property
    def key(self) -> _Key:
        return self.shard.place, self.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the gathered weight."""
        return self.shard.value.size * self.shard.sharded.count * self.dtype.itemsize


_Key = tuple[Any, Any]


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
        self, frame: Jaxpr, limits: GatherLimits, starts: Sequence[Sequence[_Gather]]
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

    def look_up(self, lookup: RowLookup, inputs: Sequence[Any]) -> Any:
        """Returns rows of a weight, of which two blocks at a time are in memory."""
        _, ids = self._start(lookup.eqn, inputs)
        return lookup.rows(ids, self)

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

    def _next_starts(self) -> Sequence[_Gather]:
        self._num_uses += 1
        return self._starts[self._num_uses - 1]

    def _awaited(self) -> list[tuple[Any, Any]]:
        """Returns the sums and updates that the current operation waits for."""
        awaited = [(holder, key) for holder, key, use in self._sums if use <= self._num_uses]
        self._sums = [one for one in self._sums if one[-1] > self._num_uses]
        return awaited

    def _whole(self, value: Any) -> Any:
        if isinstance(value, WeightShard):
            return self._weight(_Gather(value, value.value.dtype))
        if not isinstance(value, Deferred):
            return value
        if (dtype := narrowing_cast(value)) is not None:  # sends fewer bytes
            return self._weight(_Gather(value.inputs[0], dtype))
        inputs = [self._whole(one) for one in value.inputs]
        return self._bind_one(value.eqn, inputs)[value.place]

    def _weight(self, one: _Gather) -> Any:
        if one.key in self._kept:
            self._kept.move_to_end(one.key)
            return self._kept[one.key]
        whole = self._kept[one.key] = self._arrived(one)
        return whole

    def _arrived(self, one: _Gather) -> Any:
        """Returns the result of a gather that was started."""
        return self._started[one.key].pop(0)

    def _forget(self) -> None:
        """Forgets gathered weights beyond the limit, the oldest first."""
        total = sum(map(num_bytes, self._kept.values()))
        while total > self._limits.kept_bytes:
            total -= num_bytes(self._kept.popitem(last=False)[1])


class RecordedGathers(Gathers):
    """Records which weights each operation reads. Computes types only."""

    def __init__(self, frame: Jaxpr, limits: GatherLimits | None = None) -> None:
        super().__init__(frame, limits or GatherLimits(), ())
        self._uses: list[list[_Gather]] = []
        self._layers: list[list[int]] = []

    def limits(self) -> GatherLimits:
        """Returns limits of one recomputed layer, the largest: its weights, and one weight ahead.

        Without such layers they are the largest weight. The first and the last layer of a language
        model may be as large as many others, and are not counted beside recomputed ones.
        """
        sizes = max(self._layers, key=sum, default=[]) or [one.num_bytes for one in self.all]
        ahead_bytes = max(sizes, default=0)
        return GatherLimits(sum(sizes) if self._layers else ahead_bytes, ahead_bytes)

    @contextlib.contextmanager
    def layer(self) -> Generator[None]:
        """Counts the weights that a layer gathers."""
        first = len(self._uses)
        yield
        found = {one.key: one.num_bytes for use in self._uses[first:] for one in use}
        self._layers.append([*found.values()])

    @property
    def all(self) -> list[_Gather]:
        """All gathers in order."""
        return [one for use in self._uses for one in use]

    def schedule(self) -> list[list[_Gather]]:
        """Returns, for each operation that reads weights, the gathers that start with it."""
        starts: list[list[_Gather]] = [[] for _ in self._uses]
        sizes = [sum(one.num_bytes for one in use) for use in self._uses]
        first, ahead_bytes = 0, 0  # read after the operation `first`
        for place, gathers in enumerate(self._uses):
            ahead_bytes += sizes[place] if place > first else 0
            while ahead_bytes > self._limits.ahead_bytes and first < place - 1:
                first += 1
                ahead_bytes -= sizes[first]
            starts[first if self._limits.ahead_bytes else place] += gathers
        return starts

    def bind(self, eqns: Sequence[JaxprEqn], values: Mapping[Any, Any]) -> list[Any]:
        """Returns the types of the results."""
        return [atom.aval for eqn in eqns for atom in eqn.outvars]

    def gather(self, value: Any, shard: WeightShard, dtype: Any) -> Any:
        """Returns the type of a gathered weight."""
        shape = list(value.shape)
        shape[shard.sharded.axis] *= shard.sharded.count
        return ShapedArray(tuple(shape), dtype)

    def stack(self, shards: Sequence[Any], dtype: Any) -> Any:
        """Returns the type of a stack."""
        return ShapedArray((len(shards), *shards[0].shape), dtype)

    def scan(self, eqn: JaxprEqn, loop: Loop, inputs: Sequence[Any]) -> list[Any]:
        """Returns the types of the results."""
        num_consts, num_carry = scan_counts(eqn)
        slices = [ShapedArray(one.shape[1:], one.dtype) for one in inputs[num_consts + num_carry :]]
        results = loop.record([*inputs[: num_consts + num_carry], *slices])
        length = eqn.params["length"]
        stacks = [ShapedArray((length, *one.shape), one.dtype) for one in results[num_carry:]]
        return [*(atom.aval for atom in eqn.outvars[:num_carry]), *stacks]

    def scatter(self, addend: Any, sharded: Sharded) -> Any:
        """Returns a type; nothing depends on its shape."""
        return self.whole(addend)

    def update(self, update: ShardUpdate, inputs: Sequence[Any]) -> list[Any]:
        """Returns the types of the new values."""
        return [atom.aval for atom in update.jaxpr.outvars]

    def barrier(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the values."""
        return values

    def look_up(self, lookup: RowLookup, inputs: Sequence[Any]) -> Any:
        """Returns the type of the rows."""
        self._start(lookup.eqn, inputs)
        return lookup.eqn.outvars[0].aval

    def _next_starts(self) -> Sequence[_Gather]:
        self._uses.append([])
        return ()

    def _arrived(self, one: _Gather) -> Any:
        self._uses[-1].append(one)
        return self.gather(one.shard.value, one.shard, one.dtype)

    def _awaited(self) -> list[tuple[Any, Any]]:
        return []


def _can_wait(eqn: JaxprEqn | None, place: int, value: Any) -> bool:
    if eqn is None or isinstance(value, Late) or is_literal(eqn.invars[place]):
        return False
    return hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jax.dtypes.extended)

"""A first evaluation that computes types only, and records which weights each operation reads."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.core import ShapedArray
from jax.extend.core import Jaxpr

from stratagem.execution.analysis.retracing import scan_counts
from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.gathers import (
    GatherLimits,
    Gathers,
    LargeOperation,
    Loop,
    WeightGather,
)
from stratagem.execution.late_gathers.shard_updates import ShardUpdate
from stratagem.execution.late_gathers.weights import WeightShard

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


class RecordedGathers(Gathers):
    """Records which weights each operation reads. Computes types only."""

    def __init__(self, frame: Jaxpr, limits: GatherLimits | None = None) -> None:
        super().__init__(frame, limits or GatherLimits(), ())
        self._uses: list[list[WeightGather]] = []
        self._layers: list[list[int]] = []

    def limits(self) -> GatherLimits:
        """Returns limits of one recomputed layer, the largest: its weights, and one weight ahead.

        Without such layers they are the largest weight. The first and the last layer of a language
        model may be as large as many others, and are not counted beside recomputed ones: if larger,
        they are multiplied in blocks.
        """
        sizes = max(self._layers, key=sum, default=[]) or [one.num_bytes for one in self.all]
        ahead_bytes = max(sizes, default=0)
        if not self._layers:
            return GatherLimits(ahead_bytes, ahead_bytes)
        return GatherLimits(sum(sizes), ahead_bytes, whole_bytes=sum(sizes))

    @contextlib.contextmanager
    def layer(self) -> Generator[None]:
        """Counts the weights that a layer gathers."""
        first = len(self._uses)
        yield
        found = {one.key: one.num_bytes for use in self._uses[first:] for one in use}
        self._layers.append([*found.values()])

    @property
    def all(self) -> list[WeightGather]:
        """All gathers in order."""
        return [one for use in self._uses for one in use]

    def schedule(self) -> list[list[WeightGather]]:
        """Returns, for each operation that reads weights, the gathers that start with it."""
        starts: list[list[WeightGather]] = [[] for _ in self._uses]
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

    def in_blocks(self, operation: LargeOperation, inputs: Sequence[Any]) -> Any:
        """Returns the type of the result."""
        self._start(operation.eqn, inputs)
        return operation.eqn.outvars[0].aval

    def _next_starts(self) -> Sequence[WeightGather]:
        self._uses.append([])
        return ()

    def _arrived(self, one: WeightGather) -> Any:
        self._uses[-1].append(one)
        return self.gather(one.shard.value, one.shard, one.dtype)

    def _awaited(self) -> list[tuple[Any, Any]]:
        return []

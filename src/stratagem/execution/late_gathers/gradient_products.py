"""Products that a gradient is, computed and summed in blocks.

A gradient that is summed in shards is needed by no device as a whole. A large one is computed
block by block. Each block has an equal part of every replica's shard, and is reduce-scattered
before the next but one is computed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Jaxpr

from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.weights import is_literal, num_bytes, shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


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
        return bind(self.eqns, {atom: one for atom, one in pairs if not is_literal(atom)})[-1]

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


def readers_of(jaxpr: Jaxpr) -> Mapping[Any, Sequence[JaxprEqn | None]]:
    """Returns the operations that read each value; None is an output of the jaxpr."""
    readers: dict[Any, list[JaxprEqn | None]] = collections.defaultdict(list)
    for eqn, atoms in (*((eqn, eqn.invars) for eqn in jaxpr.eqns), (None, jaxpr.outvars)):
        for atom in atoms:
            if not is_literal(atom):
                readers[atom].append(eqn)
    return readers


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

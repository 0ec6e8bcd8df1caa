"""Products with a weight that is larger than a layer's, gathered in blocks.

The last layer of a language model has a row or column for each token. It is used once in each pass,
and need not be in memory as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem.execution.late_gathers.exchanges import BlockExchange, fold_blocks
from stratagem.execution.late_gathers.gradient_products import smallest_block_bytes
from stratagem.execution.late_gathers.weights import (
    Deferred,
    Late,
    WeightShard,
    is_literal,
    narrowing_cast,
    shape_of,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


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
        if found is None or is_literal(eqn.invars[1 - late[0]]):
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

    def value(self, inputs: Sequence[Any], exchange: BlockExchange) -> Any:
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

    def _gathered(self, exchange: BlockExchange, shard: Any, block: tuple[int, int]) -> Any:
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

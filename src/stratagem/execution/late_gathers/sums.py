"""Reduce-scattered sums of a step, and the updates that follow from them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.gathers import Gathers
from stratagem.execution.late_gathers.gradient_products import GradientProduct
from stratagem.execution.late_gathers.shard_updates import ShardUpdate
from stratagem.execution.late_gathers.weights import WeightShard


class Sums:
    """Sums values as soon as they are computed, and runs an update once its sums are there.

    `addends` maps an addend to how its sum is sharded. `updates` have their inputs:
    `step_inputs`, or values that are given to `add`.
    """

    def __init__(
        self,
        gathers: Gathers,
        addends: Mapping[Any, Sharded],
        updates: Sequence[tuple[ShardUpdate, Sequence[Any]]],
        step_inputs: Mapping[Any, Any],
    ) -> None:
        self._gathers = gathers
        self.addends = addends
        self._updates = updates
        self._inputs = step_inputs
        self.values: dict[Any, Any] = {}
        self.updated: dict[int, list[Any]] = {}
        self._waiting = [{one for one in atoms if one not in step_inputs} for _, atoms in updates]
        self._readers: dict[Any, list[int]] = collections.defaultdict(list)
        for place, atoms in enumerate(self._waiting):
            for atom in atoms:
                self._readers[atom].append(place)

    def wants(self, atom: Any) -> bool:
        """Returns True for a value that is summed, or that an update reads."""
        return atom in self.addends or atom in self._readers

    def add(self, atom: Any, value: Any, *, is_summed: bool) -> None:
        """Sums an addend that is not summed yet, and runs the updates that waited for it only."""
        sharded = None if is_summed else self.addends.get(atom)
        is_product = isinstance(value, GradientProduct)
        is_in_blocks = is_product and sharded is not None and value.num_blocks(sharded) > 1
        # A block is also sent behind the product of the next one.
        num_hiding = 1 if is_in_blocks else 2
        self.values[atom] = value if sharded is None else self._gathers.scatter(value, sharded)
        if sharded is not None and atom not in self._readers:
            self._gathers.wait_for(self.values, atom, num_hiding)
        for place in self._readers.get(atom, ()):
            self._waiting[place].discard(atom)
            if not self._waiting[place]:
                self._update(place)
                self._gathers.wait_for(self.updated[place], 0, num_hiding)

    def _update(self, place: int) -> None:
        update, atoms = self._updates[place]
        inputs = [self.values[one] if one in self.values else self._inputs[one] for one in atoms]
        inputs = [one.value if isinstance(one, WeightShard) else one for one in inputs]
        self.updated[place] = self._gathers.update(update, inputs)

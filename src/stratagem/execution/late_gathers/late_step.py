"""Late gathers: a step gathers each sharded weight for one use at a time.

A weight that enters a step whole exists on each device from its first use to its last, in the
backward pass. Here it enters as a shard. Each operation that reads it gathers it anew, and the
gathered copy ends with the operation, as in FSDP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from stratagem.execution.late_gathers.early_outputs import with_early_outputs
from stratagem.execution.late_gathers.evaluation import Evaluation, scheduled
from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.gathers import Gathers
from stratagem.execution.late_gathers.shard_updates import ShardUpdate
from stratagem.execution.late_gathers.sums import Sums
from stratagem.execution.late_gathers.weights import WeightShard, is_literal, num_bytes

# Smaller weights are gathered together at the start: their messages cost more than their memory.
_MIN_LATE_BYTES = 2**17


@dataclasses.dataclass(frozen=True)
class LateStep:
    """The replicas' part of a step, run in a `shard_map`.

    `shards` says how each input is sharded that is a shard; None for others. `is_steady` are the
    inputs that do not depend on the batch. The output at a place in `sums` is summed over replicas
    as soon as it is computed, and each replica gets its shard of the sum. Outputs for the update
    begin at `first_handed`. Those at places in `returned` are returned.
    """

    jaxpr: Jaxpr
    shards: Sequence[Sharded | None]
    is_steady: Sequence[bool]
    sums: Mapping[int, Sharded]
    updates: Sequence[ShardUpdate]
    first_handed: int
    returned: Sequence[int]

    @functools.cached_property
    def read_inputs(self) -> list[int]:
        """Places of the inputs that the replicas or their updates read."""
        read = {atom for eqn in self.jaxpr.eqns for atom in eqn.invars if not is_literal(atom)}
        read |= {atom for atom in self.jaxpr.outvars if not is_literal(atom)}
        for update in self.updates:
            read |= {self.jaxpr.invars[i] for kind, i in update.sources if kind == "input"}
        return [place for place, invar in enumerate(self.jaxpr.invars) if invar in read]

    @functools.cached_property
    def _ordered(self) -> Jaxpr:
        return with_early_outputs(self.jaxpr)

    def outputs(self, inputs: Mapping[int, Any]) -> tuple[list[Any], list[list[Any]]]:
        """Returns the outputs of the jaxpr, and the new shards of each update.

        `inputs` has the value of each input that is read.
        """
        return scheduled(self.jaxpr, functools.partial(self._run, inputs))

    def _run(
        self, inputs: Mapping[int, Any], gathers: Gathers
    ) -> tuple[list[Any], list[list[Any]]]:
        invars, outvars = self.jaxpr.invars, self.jaxpr.outvars
        values = {
            invars[place]: value
            if (sharded := self.shards[place]) is None
            else WeightShard(value, sharded, place)
            for place, value in inputs.items()
        }
        sums = Sums(
            gathers,
            {outvars[place]: sharded for place, sharded in self.sums.items()},
            [(one, [self._atom(*source) for source in one.sources]) for one in self.updates],
            values,
        )
        steady = {invar for invar, is_one in zip(invars, self.is_steady, strict=True) if is_one}
        at_once = {atom: _gathered_if_small(value, gathers) for atom, value in values.items()}
        outputs = Evaluation(gathers, self._ordered, at_once, steady, sums).outputs()
        for place in self.sums:
            outputs[place] = sums.values[outvars[place]]
        updated = [sums.updated[place] for place in range(len(self.updates))]
        return [gathers.whole(outputs[place]) for place in self.returned], updated

    def _atom(self, kind: str, place: int) -> Any:
        if kind == "input":
            return self.jaxpr.invars[place]
        return self.jaxpr.outvars[self.first_handed + place]


def _gathered_if_small(value: Any, gathers: Gathers) -> Any:
    if not isinstance(value, WeightShard):
        return value
    is_small = num_bytes(value.value) * value.sharded.count < _MIN_LATE_BYTES
    return gathers.gather(value.value, value, value.value.dtype) if is_small else value

"""Late gathers: a step gathers each sharded weight for one use at a time.

A weight that enters a step whole exists on each device from its first use to its last, in the
backward pass. Here it enters as a shard. Each operation that reads it gathers it anew, and the
gathered copy ends with the operation, as in FSDP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Jaxpr

from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.gathers import Gathers, RecordedGathers
from stratagem.execution.late_gathers.gradient_products import (
    GradientProduct,
    product_chain,
    readers_of,
)
from stratagem.execution.late_gathers.shard_updates import ShardUpdate
from stratagem.execution.late_gathers.sums import Sums
from stratagem.execution.late_gathers.weights import (
    Deferred,
    Late,
    WeightShard,
    inner_jaxpr,
    is_cheap,
    is_literal,
    is_recomputation,
    num_bytes,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


__all__ = ["LateStep"]

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

    def outputs(self, inputs: Mapping[int, Any]) -> tuple[list[Any], list[list[Any]]]:
        """Returns the outputs of the jaxpr, and the new shards of each update.

        `inputs` has the value of each input that is read.
        """
        once = RecordedGathers(self.jaxpr)
        self._run(inputs, once)
        limits = once.limits()
        recorded = RecordedGathers(self.jaxpr, limits)
        self._run(inputs, recorded)
        return self._run(inputs, Gathers(self.jaxpr, limits, recorded.schedule()))

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
        outputs = _Evaluation(gathers, self.jaxpr, at_once, steady, sums).outputs()
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


class _Evaluation:
    """The evaluation of one jaxpr, from its first operation to its last.

    Operations without weights are evaluated together, up to the next one that reads a weight.
    """

    def __init__(
        self,
        gathers: Gathers,
        jaxpr: Jaxpr,
        inputs: Mapping[Any, Any],
        steady: set[Any],
        sums: Sums | None = None,
    ) -> None:
        self._gathers = gathers
        self._jaxpr = jaxpr
        self._values = dict(inputs)
        self._steady = steady
        self._sums = sums
        self._pending: list[JaxprEqn] = []
        self._readers = readers_of(jaxpr)
        self._in_products: set[int] = set()  # operations that follow a product, by identity
        self._saved = {
            atom
            for eqn in jaxpr.eqns
            if is_recomputation(eqn)
            for atom in eqn.invars
            if not is_literal(atom)
        }

    def outputs(self) -> list[Any]:
        """Returns the outputs, which may be deferred."""
        self._add_sums([*self._values])  # a gradient may be an argument of the step
        for eqn in self._jaxpr.eqns:
            self._evaluate(eqn)
            self._compute_saved(eqn.outvars)
            self._add_sums(eqn.outvars)
        self._flush()
        return [self._read(atom) for atom in self._jaxpr.outvars]

    def is_steady(self, atom: Any) -> bool:
        """Returns True for a value that does not depend on the batch."""
        return is_literal(atom) or atom in self._steady

    def _compute_saved(self, atoms: Sequence[Any]) -> None:
        """Computes the inputs of recomputed layers, as the forward pass leaves them.

        The compiler would keep the addends of a residual stream and add them again.
        """
        saved = [atom for atom in atoms if atom in self._saved and not self.is_steady(atom)]
        if saved:
            self._flush()
            values = self._gathers.barrier([self._values[atom] for atom in saved])
            self._values.update(zip(saved, values, strict=True))

    def _add_sums(self, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if self._sums is not None and self._sums.wants(atom):
                self._flush()
                value = self._values[atom]
                is_product = isinstance(value, GradientProduct)
                self._sums.add(atom, value if is_product else self._gathers.whole(value))

    def _read(self, atom: Any) -> Any:
        return atom.val if is_literal(atom) else self._values[atom]

    def _evaluate(self, eqn: JaxprEqn) -> None:
        if id(eqn) in self._in_products:
            return
        variables = [atom for atom in eqn.invars if not is_literal(atom)]
        is_steady = bool(variables) and not eqn.effects and all(map(self.is_steady, variables))
        if is_steady:
            self._steady.update(eqn.outvars)
        if not any(isinstance(self._values.get(one), Late) for one in variables):
            if not self._defer_product(eqn):
                self._pending.append(eqn)
            return
        self._flush()
        inputs = [self._read(atom) for atom in eqn.invars]
        if is_steady and is_cheap(eqn):
            results = [Deferred(eqn, inputs, place) for place in range(len(eqn.outvars))]
        elif (inner := inner_jaxpr(eqn)) is not None:
            results = [
                value if self._is_only_summed(atom) else self._computed(value)
                for atom, value in zip(
                    eqn.outvars, self._evaluate_inner(eqn, inner, inputs), strict=True
                )
            ]
        else:
            results = self._gathers.evaluate(eqn, inputs)
        self._values.update(zip(eqn.outvars, results, strict=True))

    def _computed(self, value: Any) -> Any:
        return self._gathers.whole(value) if isinstance(value, GradientProduct) else value

    def _is_only_summed(self, atom: Any) -> bool:
        """Returns True for an output that is summed, or that a caller may sum."""
        is_output = [*self._readers[atom]] == [None]
        return is_output and (self._sums is None or self._sums.is_addend(atom))

    def _defer_product(self, eqn: JaxprEqn) -> bool:
        """Leaves a product to its sum; returns False for other operations."""
        chain = product_chain(eqn, self._readers)
        if not (chain and self._is_only_summed(result := chain[-1].outvars[0])):
            return False
        self._flush()
        self._values[result] = GradientProduct(chain, [self._read(atom) for atom in eqn.invars])
        self._in_products.update(map(id, chain[1:]))
        return True

    def _evaluate_inner(self, eqn: JaxprEqn, inner: Jaxpr, inputs: list[Any]) -> list[Any]:
        if is_recomputation(eqn):  # the compiler must not take the results of the forward pass
            places = [i for i, one in enumerate(inputs) if not isinstance(one, Late)]
            waited = self._gathers.barrier([inputs[place] for place in places])
            for place, value in zip(places, waited, strict=True):
                inputs[place] = value
        pairs = zip(inner.invars, eqn.invars, strict=True)
        steady = {invar for invar, atom in pairs if self.is_steady(atom)}
        values = dict(zip(inner.invars, inputs, strict=True))
        run = _Evaluation(self._gathers, inner, values, steady)
        with self._gathers.layer() if is_recomputation(eqn) else contextlib.nullcontext():
            results = run.outputs()
        outvars = zip(eqn.outvars, inner.outvars, strict=True)
        self._steady |= {outvar for outvar, atom in outvars if run.is_steady(atom)}
        return results

    def _flush(self) -> None:
        """Evaluates the operations without weights that came since the last one with a weight."""
        if not self._pending:
            return
        made = [atom for eqn in self._pending for atom in eqn.outvars]
        own = set(made)
        needed = {
            atom: self._values[atom]
            for eqn in self._pending
            for atom in eqn.invars
            if not is_literal(atom) and atom not in own
        }
        self._values.update(zip(made, self._gathers.bind(self._pending, needed), strict=True))
        self._pending = []

"""The evaluation of a jaxpr whose weights come as shards.

Each operation that reads a weight gathers it. Gradients are summed where they are computed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Jaxpr

from stratagem.execution.analysis.retracing import scan_counts
from stratagem.execution.late_gathers.early_outputs import is_small
from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.gathers import Gathers
from stratagem.execution.late_gathers.gradient_products import (
    GradientProduct,
    product_chain,
    readers_of,
)
from stratagem.execution.late_gathers.loops import (
    is_late_loop,
    narrower_dtype,
    shard_of,
    sharded_slice,
    sharded_stack,
    stacked_shards,
    summed_stacks,
)
from stratagem.execution.late_gathers.recorded_gathers import RecordedGathers
from stratagem.execution.late_gathers.row_lookups import GradientRows, row_chain
from stratagem.execution.late_gathers.sums import Sums
from stratagem.execution.late_gathers.weights import (
    Deferred,
    Late,
    WeightShard,
    inner_jaxpr,
    is_cheap,
    is_literal,
    is_recomputation,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


def scheduled(frame: Jaxpr, run: Callable[[Gathers], Any]) -> Any:
    """Runs a computation with gathers that start ahead; they are recorded first."""
    once = RecordedGathers(frame)
    run(once)
    limits = once.limits()
    recorded = RecordedGathers(frame, limits)
    run(recorded)
    return run(Gathers(frame, limits, recorded.schedule()))


class Evaluation:
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
        self._stacks, self._summed = summed_stacks(jaxpr, {} if sums is None else sums.addends)
        self._saved = _read_by(jaxpr, is_recomputation)
        self._scanned = _read_by(jaxpr, lambda eqn: eqn.primitive.name == "scan")

    def outputs(self) -> list[Any]:
        """Returns the outputs, which may be deferred."""
        self._add_sums([*self._values])  # a gradient may be an argument of the step
        for eqn in self._jaxpr.eqns:
            self._evaluate(eqn)
            self._compute_saved(eqn.outvars)
            self._add_sums(eqn.outvars)
            self._finish_outputs(eqn.outvars)
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
            saved = [atom for atom in saved if not isinstance(self._values[atom], Late)]
            values = self._gathers.barrier([self._values[atom] for atom in saved])
            self._values.update(zip(saved, values, strict=True))

    def _add_sums(self, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if self._sums is not None and self._sums.wants(atom):
                self._flush()
                value = self._values[atom]
                is_product = isinstance(value, GradientProduct)
                value = value if is_product else self._gathers.whole(value)
                self._sums.add(atom, value, is_summed=atom in self._summed)

    def _finish_outputs(self, atoms: Sequence[Any]) -> None:
        """Lets later operations with weights wait for small outputs of the step."""
        found = [atom for atom in atoms if None in self._readers[atom] and is_small(atom)]
        if self._sums is None or not found:
            return
        self._flush()
        for atom in found:
            is_value = not isinstance(self._values[atom], Late | GradientProduct)
            if is_value and atom not in self._sums.addends and not self.is_steady(atom):
                self._gathers.wait_for(self._values, atom, num_hiding=1)

    def _read(self, atom: Any) -> Any:
        return atom.val if is_literal(atom) else self._values[atom]

    def _evaluate(self, eqn: JaxprEqn) -> None:
        if id(eqn) in self._in_products:
            return
        variables = [atom for atom in eqn.invars if not is_literal(atom)]
        is_steady = bool(variables) and not eqn.effects and all(map(self.is_steady, variables))
        if is_steady:
            self._steady.update(eqn.outvars)
        is_summed = any(atom in self._stacks for atom in eqn.outvars)
        if not (is_summed or any(isinstance(self._values.get(one), Late) for one in variables)):
            if not self._defer_product(eqn):
                self._pending.append(eqn)
            return
        self._flush()
        inputs = [self._read(atom) for atom in eqn.invars]
        if eqn.outvars[0] in self._scanned and (shards := stacked_shards(eqn, inputs)) is not None:
            results = [self._stacked(eqn.outvars[0], shards)]
        elif is_summed or is_late_loop(eqn, inputs):
            loop = functools.partial(self._evaluate_loop, eqn)
            results = self._gathers.evaluate_loop(eqn, inputs, loop)
        elif is_steady and is_cheap(eqn):
            results = [Deferred(eqn, inputs, place) for place in range(len(eqn.outvars))]
        elif (inner := inner_jaxpr(eqn)) is not None:
            results = [
                value if self._is_only_summed(atom) else self._computed(value)
                for atom, value in zip(
                    eqn.outvars, self._evaluate_inner(eqn, inner, inputs), strict=True
                )
            ]
        elif (operation := self._gathers.large_operation(eqn, inputs)) is not None:
            results = [self._gathers.in_blocks(operation, inputs)]
        else:
            results = self._gathers.evaluate(eqn, inputs)
        self._values.update(zip(eqn.outvars, results, strict=True))

    def _computed(self, value: Any) -> Any:
        return self._gathers.whole(value) if isinstance(value, GradientProduct) else value

    def _is_only_summed(self, atom: Any) -> bool:
        """Returns True for an output that is summed, or that a caller may sum."""
        is_output = [*self._readers[atom]] == [None]
        return is_output and (self._sums is None or atom in self._sums.addends)

    def _defer_product(self, eqn: JaxprEqn) -> bool:
        """Leaves a product to its sum; returns False for other operations."""
        if chain := product_chain(eqn, self._readers):
            kind = GradientProduct
        elif chain := row_chain(eqn, self._readers):
            kind = GradientRows
        else:
            return False
        if not self._is_only_summed(result := chain[-1].outvars[0]):
            return False
        self._flush()
        self._values[result] = kind(chain, [self._read(atom) for atom in eqn.invars])
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
        run = Evaluation(self._gathers, inner, values, steady)
        with self._gathers.layer() if is_recomputation(eqn) else contextlib.nullcontext():
            results = run.outputs()
        outvars = zip(eqn.outvars, inner.outvars, strict=True)
        self._steady |= {outvar for outvar, atom in outvars if run.is_steady(atom)}
        return results

    def _stacked(self, atom: Any, shards: Sequence[WeightShard]) -> WeightShard:
        dtype = narrower_dtype(self._jaxpr, atom) or atom.aval.dtype
        stack = self._gathers.stack([one.value for one in shards], dtype)
        return WeightShard(stack, sharded_stack(shards[0].sharded), atom)

    def _evaluate_loop(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        loop = _Loop(eqn, inputs, [self.is_steady(atom) for atom in eqn.invars], self._stacks)
        arrays = [one.value if isinstance(one, WeightShard) else one for one in inputs]
        results = loop.late_results(self._gathers.scan(eqn, loop, arrays))
        pairs = zip(eqn.outvars, results, strict=True)
        self._steady |= {outvar for outvar, one in pairs if isinstance(one, Late)}
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


def _read_by(jaxpr: Jaxpr, reads: Callable[[JaxprEqn], bool]) -> set[Any]:
    """Returns the values that operations of a kind read."""
    eqns = filter(reads, jaxpr.eqns)
    return {atom for eqn in eqns for atom in eqn.invars if not is_literal(atom)}


class _Loop:
    """A scan of which an iteration gathers its own slices of stacks, and sums its own gradients.

    `stacks` says how results are sharded that are summed in the loop.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        inputs: Sequence[Any],
        are_steady: Sequence[bool],
        stacks: Mapping[Any, Sharded],
    ) -> None:
        self._eqn, self._inputs, self._stacks = eqn, inputs, stacks
        self._body: Jaxpr = eqn.params["jaxpr"].jaxpr
        num_consts, num_carry = scan_counts(eqn)
        self._first_slice, self._num_carry = num_consts + num_carry, num_carry
        carried = range(num_consts, self._first_slice)
        pairs = zip(self._body.invars, are_steady, strict=True)
        self._steady = {one for i, (one, steady) in enumerate(pairs) if steady and i not in carried}
        self._shards: dict[int, WeightShard] = {}

    def step(self, values: Sequence[Any]) -> list[Any]:
        """Returns the results of one iteration."""
        return scheduled(self._body, functools.partial(self._run, values))

    def record(self, values: Sequence[Any]) -> list[Any]:
        """Returns the types of the results of one iteration."""
        return self._run(values, RecordedGathers(self._body))

    def late_results(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results of the loop, those that are stacked shards as such."""
        late = [*results]
        for place, shard in self._shards.items():
            is_input = isinstance(shard.place, int)  # a slice that the loop passes on
            late[place] = (
                self._inputs[shard.place]
                if is_input
                else WeightShard(
                    results[place], sharded_stack(shard.sharded), self._eqn.outvars[place]
                )
            )
        return late

    def _run(self, values: Sequence[Any], gathers: Gathers) -> list[Any]:
        inputs = [self._input(place, value) for place, value in enumerate(values)]
        pairs = dict(zip(self._body.invars, inputs, strict=True))
        outputs = Evaluation(gathers, self._body, pairs, set(self._steady)).outputs()
        return [self._output(place, value, gathers) for place, value in enumerate(outputs)]

    def _input(self, place: int, value: Any) -> Any:
        stack = self._inputs[place]
        if not isinstance(stack, WeightShard):
            return value
        return WeightShard(value, sharded_slice(stack.sharded), place)

    def _output(self, place: int, value: Any, gathers: Gathers) -> Any:
        shard = shard_of(value) if place >= self._num_carry else None
        if shard is not None:
            self._shards[place] = shard
            return shard.value
        stack = self._stacks.get(self._eqn.outvars[place])
        if stack is None:
            return gathers.whole(value)
        is_product = isinstance(value, GradientProduct)
        return gathers.scatter(value if is_product else gathers.whole(value), sharded_slice(stack))

"""Late gathers: a step gathers each sharded weight for one use at a time.

A weight that enters a step whole exists on each device from its first use to its last, in the
backward pass. Here it enters as a shard. Each operation that reads it gathers it anew, and the
gathered copy ends with the operation, as in FSDP.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Literal

from stratagem.execution.jaxprs import free_variables, readers_of, scan_counts, variables_in
from stratagem.execution.programs.late_gathers import (
    GatherLimits,
    Gathers,
    ShardUpdate,
    WeightGather,
)
from stratagem.execution.programs.late_weights import (
    Deferred,
    GradientProduct,
    GradientRows,
    Late,
    Sharded,
    WeightShard,
    inner_jaxpr,
    is_cheap,
    is_late_loop,
    is_recomputation,
    narrower_dtype,
    num_bytes,
    product_chain,
    row_chain,
    shard_of,
    sharded_slice,
    sharded_stack,
    stacked_shards,
    summed_stacks,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# A first evaluation that computes types only, and records which weights each operation reads.


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

    def scan(self, eqn: JaxprEqn, loop: _Loop, inputs: Sequence[Any]) -> list[Any]:
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

    def in_blocks(self, operation: Any, inputs: Sequence[Any]) -> Any:
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


# Small outputs of a step, such as its loss and metrics, computed as soon as their inputs are.
#
# They need large values: the loss needs the logits. The compiler would leave them to the end, and
# keep these values for as long.

_MAX_ELEMENTS = 2**16


def is_small(atom: Any) -> bool:
    """Returns True for a value of a jaxpr that may exist to the end of a step."""
    return not isinstance(atom, Literal) and atom.aval.size <= _MAX_ELEMENTS


def with_early_outputs(jaxpr: Jaxpr) -> Jaxpr:
    """Moves operations from which only small outputs follow to right behind their inputs."""
    readers = readers_of(jaxpr)
    ending: set[int] = set()
    for eqn in reversed(jaxpr.eqns):
        reading = [(one, atom) for atom in eqn.outvars for one in readers[atom]]
        if not eqn.effects and all(
            is_small(atom) if one is None else id(one) in ending for one, atom in reading
        ):
            ending.add(id(eqn))
    places: dict[Any, int] = {}  # of the operation behind which a value exists
    moved: dict[int, list[Any]] = collections.defaultdict(list)
    for place, eqn in enumerate(jaxpr.eqns):
        if id(eqn) in ending:
            inputs = variables_in(eqn.invars)
            behind = max((places.get(atom, -1) for atom in inputs), default=-1)
            moved[behind].append(eqn)
        else:
            behind = place
        places.update(dict.fromkeys(eqn.outvars, behind))
    eqns = [*moved[-1]]
    for place, eqn in enumerate(jaxpr.eqns):
        eqns += [*([] if id(eqn) in ending else [eqn]), *moved[place]]
    return jaxpr.replace(eqns=eqns)


# Reduce-scattered sums of a step, and the updates that follow from them.


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
        # A gradient that is an argument of the step is there, but not summed yet.
        self._waiting = [
            {one for one in atoms if one not in step_inputs or one in addends}
            for _, atoms in updates
        ]
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


# The evaluation of a jaxpr whose weights come as shards.
#
# Each operation that reads a weight gathers it. Gradients are summed where they are computed.


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
        return isinstance(atom, Literal) or atom in self._steady

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
        return atom.val if isinstance(atom, Literal) else self._values[atom]

    def _evaluate(self, eqn: JaxprEqn) -> None:
        if id(eqn) in self._in_products:
            return
        variables = variables_in(eqn.invars)
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
        needed = {atom: self._values[atom] for atom in free_variables(self._pending)}
        self._values.update(zip(made, self._gathers.bind(self._pending, needed), strict=True))
        self._pending = []


def _read_by(jaxpr: Jaxpr, reads: Callable[[JaxprEqn], bool]) -> set[Any]:
    """Returns the values that operations of a kind read."""
    return {atom for eqn in filter(reads, jaxpr.eqns) for atom in variables_in(eqn.invars)}


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
        read = {*readers_of(self.jaxpr)}
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

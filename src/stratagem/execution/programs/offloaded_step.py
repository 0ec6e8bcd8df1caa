"""Steps with offloaded variables: replicas compute, and updates run where variables are stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from stratagem.devices.mesh import Topology, start_lock
from stratagem.execution.jaxprs import retrace
from stratagem.execution.programs.sharded_step import StepParts, part_step
from stratagem.execution.programs.steps import (
    POOLS,
    IdsProgram,
    ReplicaStep,
    StepProgram,
    shape_on,
    value_for_step,
)
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import Lookup
from stratagem.variables.layouts import Store, store_of
from stratagem.variables.placement import take_rows

if TYPE_CHECKING:
    import keras
    import numpy as np


def is_offloaded(trace: Trace) -> bool:
    """True if a step has variables stored elsewhere than on its devices."""
    return any(store_of(variable) is not None for variable in trace.variables)


class OffloadedStep(ReplicaStep):
    """The replicas' computation, and an update of the variables of each store, in `updates`.

    Values that only an update reads, such as slots, never leave their store. Lookups move rows
    instead of whole tables.
    """

    may_loop = False

    def __init__(self, trace: Trace, topology: Topology, *, is_staged: bool = False) -> None:
        self.updates: list[_Update] = []
        for store in {store_of(variable): None for variable in trace.written}:
            if store is not None:
                trace = self._part(trace, store)
        super().__init__(trace, topology, is_staged=is_staged)
        self.num_handed = sum(update.num_handed for update in self.updates)

    def programs(self, arguments: Arguments, name: str) -> list[StepProgram]:
        """Returns all programs of one step: lookups first, updates last."""
        (of_replicas,) = super().programs(arguments, name)
        pools: dict[str, list[Any]] = dict(zip(POOLS, of_replicas.shapes, strict=True))
        programs = self._lookup_programs(pools, name)
        programs.append(of_replicas)
        avals = self.trace.jaxpr.out_avals
        pools["handed"] = [
            shape_on(aval, self.topology.replicated)
            for aval in avals[len(avals) - self.num_handed :]
        ]
        first = 0
        for update in self.updates:
            handed = pools["handed"][first : first + update.num_handed]
            first += update.num_handed
            if update.has_work:
                programs.append(update.program(pools | {"handed": handed}))
        return programs

    def shape(self, variable: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and sharding of a variable as an input of the step."""
        store = store_of(variable)
        if store is None:
            return super().shape(variable)
        sharding = store.step_sharding(tuple(variable.shape), self.topology)
        return shape_on(value_for_step(variable), sharding)

    def _lookup_programs(self, pools: dict[str, list[Any]], name: str) -> list[StepProgram]:
        """Returns the programs that compute ids of lookups and fetch their rows."""
        if not self.trace.lookups:
            return []
        topology = self.topology
        first, ids = IdsProgram(self.trace, topology, name).program(pools)
        programs = [first]
        for lookup, numbers in zip(self.trace.lookups, ids, strict=True):
            if numbers is None:  # an unused lookup
                continue
            store: Store = lookup.table.store
            is_here = store.is_on_replicas
            function = jax.jit(functools.partial(_rows, store, topology)) if is_here else take_rows
            table = shape_on(lookup.table.for_step, store.sharding(tuple(lookup.table.shape)))
            place = pools["rows"][0].sharding if is_here else store.update_sharding()
            programs.append(
                StepProgram(
                    "rows",
                    function,
                    (table, shape_on(numbers, place)),
                    [] if store.is_pinned else [table],
                    is_of_replicas=is_here,
                    brought=[table] if store.is_pinned else [],
                )
            )
        return programs

    def _part(self, trace: Trace, store: Store) -> Trace:
        """Splits off the update for one store; returns the remaining trace."""
        outputs = trace.jaxpr.jaxpr.outvars
        may_update = [store_of(variable) == store for variable in trace.written]
        may_update += [False] * (len(outputs) - len(may_update))
        old_values = {
            index: place for place, (pool, index) in enumerate(trace.inputs) if pool == "written"
        }
        parts = part_step(trace.jaxpr.jaxpr, trace.differing_inputs, may_update, old_values)
        self.updates.append(_Update(trace, parts, store))
        return _of_replicas(trace, parts)

    def finish(self, handed: list[Any], shared: list[Any]) -> None:
        """Updates the variables from the sums over replicas."""
        first = 0
        inputs: list[tuple[_Update, Any]] = []
        for update in self.updates:  # read all inputs before any update writes
            own_part = handed[first : first + update.num_handed]
            inputs.append((update, update.inputs(own_part, shared)))
            first += update.num_handed
        for update, values in inputs:
            update.run(*values)


def _rows(store: Store, topology: Topology, table: jax.Array, ids: jax.Array) -> Any:
    return store.rows(store.load(table), ids, topology)


class _Update:
    """The update program for the variables of one store."""

    def __init__(self, trace: Trace, parts: StepParts, store: Store) -> None:
        self.num_handed = parts.num_handed
        self._store = store
        self._constants = trace.constants
        self.jaxpr = parts.update
        self._updated = [
            variable
            for variable, is_updated in zip(trace.written, parts.is_updated, strict=False)
            if is_updated
        ]
        sources = [_Source.of(trace, place) for place in parts.update_inputs]
        # Old values in the order of the new ones, so that each new value reuses its buffer.
        ranks = {id(variable): place for place, variable in enumerate(self._updated)}
        own = [place for place, source in enumerate(sources) if id(source.variable) in ranks]
        own.sort(key=lambda place: ranks[id(sources[place].variable)])
        others = [place for place in range(len(sources)) if place not in set(own)]
        self._own = [sources[place].variable for place in own]
        self._others = [sources[place] for place in others]
        self._order = [*own, *others]
        places = [store.sharding(tuple(variable.shape)) for variable in self._updated]
        self._run = jax.jit(self._values, donate_argnums=0, out_shardings=places)

    @property
    def has_work(self) -> bool:
        """True if this program updates any variables."""
        return bool(self._updated)

    def _values(self, own: list[Any], others: list[Any]) -> list[Any]:
        own = [self._store.load(value) for value in own]
        others = [
            self._store.load(value) if self._is_in_store(source.variable) else value
            for source, value in zip(self._others, others, strict=True)
        ]
        inputs = dict(zip(self._order, [*own, *others], strict=True))
        in_order = [inputs[place] for place in range(len(inputs))]
        return [self._store.unload(value) for value in retrace(self.jaxpr, in_order)]

    def inputs(self, handed: list[Any], shared: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the donated old values of updated variables, and all other inputs."""
        pools = {"handed": handed, "shared": shared, "constant": self._constants}
        own = [variable.stored for variable in self._own]
        others = [
            self._store.for_update(pools[source.pool][source.index])
            if source.variable is None
            else self._for_update(source.variable)
            for source in self._others
        ]
        return own, others

    def program(self, pools: dict[str, list[Any]]) -> StepProgram:
        """Returns the program with shapes, from the shapes in `pools`."""
        own = [self._shape(variable) for variable in self._own]
        others = [
            shape_on(pools[source.pool][source.index], self._store.update_sharding())
            if source.variable is None
            else self._shape(source.variable)
            for source in self._others
        ]
        is_here, is_pinned = self._store.is_on_replicas, self._store.is_pinned
        pairs = list(zip(self._others, others, strict=True))
        in_store = [*own, *(shape for source, shape in pairs if self._is_in_store(source.variable))]
        lasting = [
            shape
            for source, shape in pairs
            if source.pool != "handed" and is_here and not self._is_in_store(source.variable)
        ]
        return StepProgram(
            "update",
            self._run,
            (own, others),
            lasting if is_pinned else [*in_store, *lasting],
            is_of_replicas=is_here,
            brought=in_store if is_pinned else [],
            put_back=own if is_pinned else [],
        )

    def _shape(self, variable: Any) -> Any:
        store, shape = self._store, tuple(variable.shape)
        is_in_store = self._is_in_store(variable)
        sharding = store.sharding(shape) if is_in_store else store.update_sharding()
        return shape_on(value_for_step(variable), sharding)

    def _is_in_store(self, variable: object) -> bool:
        return variable is not None and store_of(variable) == self._store

    def run(self, own: list[Any], others: list[Any]) -> None:
        """Updates the variables from the two lists returned by `inputs`."""
        if not self.has_work:
            return
        with start_lock:
            values = self._run(own, others)
        for variable, value in zip(self._updated, values, strict=True):
            variable.stored = value

    def _for_update(self, variable: Any) -> Any:
        """Returns a variable's value for the update, moved to the store if necessary."""
        if self._is_in_store(variable):
            return variable.stored
        return self._store.for_update(value_for_step(variable))


@dataclasses.dataclass(frozen=True)
class _Source:
    """Source of an update's input: a variable, or an index into a pool of arrays."""

    variable: Any
    pool: str = ""
    index: int = 0

    @classmethod
    def of(cls, trace: Trace, place: tuple[str, int]) -> _Source:
        pool, index = place
        if pool == "input":
            pool, index = trace.inputs[index]
        variable = trace.variable(pool, index)
        return cls(None, pool, index) if variable is None else cls(variable)


class StoredRows:
    """Implements `RemoteState` for row lookups in stores of this process."""

    shares_batches = False

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def holds(self, trace: Trace) -> bool:
        """Always True: it is created for one step."""
        return True

    def updates_after_step(self, variable: keras.Variable, sent: Sequence[Any]) -> bool:
        """Always False: the step itself computes every new value."""
        return False

    def send(self, sent: Sequence[tuple[Any, Any]]) -> None:
        """Does nothing, because all changes are local."""

    def run(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
        early: Callable[[int, int, list[Any]], list[Any]],
    ) -> None:
        """Runs one step with the rows of each lookup."""
        del early  # no stages: the step itself computes every new value
        with trace.lock:
            pairs = zip(trace.lookups, ids_of(), strict=True)
            with start_lock:
                rows = [rows_of_table(lookup, ids, self._topology) for lookup, ids in pairs]
            call(rows)


def rows_of_table(lookup: Lookup, ids: jax.Array | np.ndarray | None, topology: Topology) -> Any:
    """Returns the rows of a lookup in a table of this process; zeros if `ids` is None."""
    if ids is None:
        several = (topology.num_replicas,) if topology.num_replicas > 1 else ()
        return jnp.zeros((*several, *lookup.shape), lookup.dtype)
    store: Store = lookup.table.store
    return store.rows(store.load(lookup.table.stored), ids, topology)


def _of_replicas(trace: Trace, parts: StepParts) -> Trace:
    """Returns the replicas' part of a trace, with only the variables it reads or writes."""
    written = [
        variable
        for variable, is_updated in zip(trace.written, parts.is_updated, strict=False)
        if not is_updated
    ]
    read = {id(atom) for eqn in parts.replica.eqns for atom in eqn.invars}
    read |= {id(atom) for atom in parts.replica.outvars}
    places = {id(variable): index for index, variable in enumerate(written)}
    read_only: list[Any] = []
    invars: list[Any] = []
    inputs: list[tuple[str, int]] = []
    for invar, (pool, index) in zip(parts.replica.invars, trace.inputs, strict=True):
        if id(invar) not in read:
            continue
        invars.append(invar)
        variable = trace.variable(pool, index)
        if variable is None:
            inputs.append((pool, index))
        elif id(variable) in places:
            inputs.append(("written", places[id(variable)]))
        else:
            inputs.append(("read_only", len(read_only)))
            read_only.append(variable)
    jaxpr = parts.replica.replace(invars=invars)
    return dataclasses.replace(
        trace, jaxpr=ClosedJaxpr(jaxpr, []), read_only=read_only, written=written, inputs=inputs
    )

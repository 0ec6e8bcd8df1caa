"""Steps with variables sharded over the replicas' own devices, as one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec, Sharding

from stratagem.execution.embeddings.sharded_row_updates import ShardedRowUpdates
from stratagem.execution.programs.destination import Destination
from stratagem.execution.programs.ids_program import IdsProgram, spec_of_input
from stratagem.execution.programs.program import POOLS, Program
from stratagem.execution.programs.reduce_scatter import reduce_scatter, scatter_sums
from stratagem.execution.programs.step_program import StepProgram
from stratagem.execution.programs.stores_of_sums import store_for, stores_of_sums
from stratagem.execution.programs.update_part import StepParts, part_step
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.trace import Trace
from stratagem.topology import REPLICA_AXIS, Topology
from stratagem.variables import ShardedStore, store_of

if TYPE_CHECKING:
    import keras


__all__ = ["ShardedProgram", "is_sharded"]

_Pools = Mapping[str, Sequence[Any]]


def is_sharded(trace: Trace, topology: Topology) -> bool:
    """True if all stored variables of a step are sharded over its devices."""
    return all(
        isinstance(store, ShardedStore) and store.topology == topology for store in _stores(trace)
    )


class ShardedProgram(Program):
    """The replicas' computation and a sharded update, in one program.

    Sums that only the update reads are reduce-scattered. Rows of tables are exchanged within the
    program. Each device copies its own shards from and to pinned host memory.
    """

    def __init__(self, trace: Trace, topology: Topology, name: str) -> None:
        self._store: ShardedStore = _stores(trace)[0]
        trace = _with_tables(trace)
        self._exchanged = _ExchangedRows(trace, topology, name) if trace.lookups else None
        self.parts, self._sum_axes, self._sum_specs = _parts_of(trace, self._store)
        self.update = _update_of(trace, self.parts, topology)
        self._specs = _specs_of_outputs(trace, self.parts, self._sum_axes)
        super().__init__(trace, topology, name)

    def _compile(self, *, many: bool) -> Any:
        function = self._many_steps if many else self._one_step
        return self._jit(function, many=many)

    def programs(self, arguments: Arguments) -> list[StepProgram]:
        """Returns the one program, with the transfers from and to pinned memory."""
        (program,) = super().programs(arguments)
        written, read_only = program.shapes[:2]
        put_back = _pinned(self.trace.written, written)
        brought = [*put_back, *_pinned(self.trace.read_only, read_only)]
        return [dataclasses.replace(program, brought=brought, put_back=put_back)]

    def _row_shapes(self, split: Sharding) -> list[jax.ShapeDtypeStruct]:
        return []  # exchanged within the program

    def _out_shardings(self) -> Any:
        topology = self._topology
        written = [self._sharding(variable) for variable in self.trace.written]
        split = topology.stacked if topology.num_replicas > 1 else topology.replicated
        return written, split, topology.replicated, topology.replicated

    def _value(self, variable: Any) -> Any:
        return super()._value(variable) if store_of(variable) is None else variable.stored

    def _sharding(self, variable: Any) -> Sharding:
        store = store_of(variable)
        return super()._sharding(variable) if store is None else store.sharding(variable.shape)

    def _one_step(self, *arrays: list[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
        """Runs one step on global arrays."""
        pools: dict[str, Sequence[Any]] = dict(zip(POOLS, arrays, strict=True))
        pools["written"] = [*map(_loaded, self.trace.written, pools["written"])]
        pools["read_only"] = [*map(_loaded, self.trace.read_only, pools["read_only"])]
        if self._exchanged is not None:
            pools["rows"] = self._exchanged.rows(pools)
        inputs = [pools[source][index] for source, index in self.trace.inputs]
        outputs = self._computed_by_replicas(inputs)
        end = len(outputs) - self.parts.num_handed
        of_update = {"input": inputs, "handed": outputs[end:]}
        update_inputs = [of_update[pool][place] for pool, place in self.parts.update_inputs]
        updated = iter(self.update.values(update_inputs))
        others = iter(outputs[:end])
        values = [
            self._updated(one, next(updated)) if is_updated else _unloaded(one, next(others))
            for one, is_updated in zip(self.trace.written, self.parts.is_updated, strict=False)
        ]
        return values, list(others), self._token([*pools["split"], *pools["shared"]]), []

    def _computed_by_replicas(self, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = self.parts.replica
        read = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
        read |= {id(atom) for atom in jaxpr.outvars}
        # Values that the replicas do not read are not gathered.
        places = [place for place, invar in enumerate(jaxpr.invars) if id(invar) in read]
        own_part = ClosedJaxpr(jaxpr.replace(invars=[jaxpr.invars[place] for place in places]), [])
        first = len(jaxpr.outvars) - self.parts.num_handed

        def of_one(*values: object) -> list[Any]:
            outputs = list(jaxpr_as_fun(own_part)(*values))
            for place, axis in enumerate(self._sum_axes, first):
                if axis is not None:
                    spec = self._sum_specs[place - first]
                    outputs[place] = reduce_scatter(outputs[place], axis, spec, self._topology)
            return outputs

        if self._topology.num_replicas == 1:
            return of_one(*[inputs[place] for place in places])
        specs = [spec_of_input(*self.trace.inputs[place], self.trace) for place in places]
        run = jax.shard_map(
            of_one,
            mesh=self._topology.mesh,
            in_specs=tuple(specs),
            out_specs=self._specs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )
        return run(*[inputs[place] for place in places])

    def _updated(self, variable: Any, value: jax.Array) -> Any:
        """Returns a new value in its store; each device computes one shard."""
        parted = store_for(variable, self._store).compute_sharding(tuple(variable.shape))
        value = jax.lax.with_sharding_constraint(value, parted)
        if store_of(variable) is None:  # replicated
            return jax.lax.with_sharding_constraint(value, self._sharding(variable))
        return _unloaded(variable, value)


class _ExchangedRows:
    """Row lookups in tables that are inputs of the program."""

    def __init__(self, trace: Trace, topology: Topology, name: str) -> None:
        self._lookups = trace.lookups
        self._topology = topology
        self._ids = IdsProgram(trace, topology, name)
        self._places = {
            id(variable): (pool, index)
            for pool, variables in (("written", trace.written), ("read_only", trace.read_only))
            for index, variable in enumerate(variables)
        }

    def rows(self, pools: _Pools) -> list[Any]:
        """Returns the rows of each lookup for all replicas."""
        count = self._topology.num_replicas
        several = (count,) if count > 1 else ()
        rows: list[Any] = []
        for lookup, ids in zip(self._lookups, self._ids.run(pools), strict=True):
            if ids is None:  # unused
                rows.append(jnp.zeros((*several, *lookup.shape), lookup.dtype))
                continue
            pool, index = self._places[id(lookup.table)]
            rows.append(lookup.table.store.rows(pools[pool][index], ids, self._topology))
        return rows


def _loaded(variable: keras.Variable, value: jax.Array) -> Any:
    store = store_of(variable)
    return value if store is None else store.load(value)


def _unloaded(variable: object, value: jax.Array) -> Any:
    store = store_of(variable)
    return value if store is None else store.unload(value)


def _pinned(variables: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Returns the shapes of variables in pinned memory."""
    pairs = [(store_of(one), shape) for one, shape in zip(variables, shapes, strict=True)]
    return [shape for store, shape in pairs if store is not None and store.is_pinned]


def _stores(trace: Trace) -> list[Any]:
    variables = (*trace.written, *trace.read_only, *(one.table for one in trace.lookups))
    return [store for one in variables if (store := store_of(one)) is not None]


def _with_tables(trace: Trace) -> Trace:
    """Adds tables used only by lookups to the read-only variables of a trace."""
    known = {id(variable) for variable in (*trace.written, *trace.read_only)}
    tables = {id(one.table): one.table for one in trace.lookups if id(one.table) not in known}
    return dataclasses.replace(trace, read_only=[*trace.read_only, *tables.values()])


def _parts_of(
    trace: Trace, store: ShardedStore
) -> tuple[StepParts, list[int | None], list[PartitionSpec]]:
    """Splits a step into replica part and update.

    Also returns the axis of each reduce-scattered sum, and the spec of each sum in a replica.
    """
    jaxpr = trace.jaxpr.jaxpr
    outvars = jaxpr.outvars[: len(trace.written) + trace.num_outputs]  # without the ids
    # Sharded slots may update a replicated variable.
    owners = {id(getattr(one, "slot_of", None)) for one in trace.written if store_of(one)}
    may_update = [store_of(one) is not None or id(one) in owners for one in trace.written]
    may_update += [False] * trace.num_outputs
    parts = part_step(jaxpr.replace(outvars=outvars), trace.differing_inputs, may_update)
    stores = stores_of_sums(trace, parts, store)
    divisions = [None if one is None else one.division for one in stores]
    specs = [PartitionSpec() if one is None else one.logical_spec for one in divisions]
    return *scatter_sums(parts, stores), specs


def _update_of(trace: Trace, parts: StepParts, topology: Topology) -> ShardedRowUpdates:
    def is_by_rows(pool: str, place: int) -> bool:
        source, index = trace.inputs[place] if pool == "input" else (pool, place)
        variables = {"written": trace.written, "read_only": trace.read_only}.get(source)
        store = None if variables is None else store_of(variables[index])
        if variables is None or not isinstance(store, ShardedStore):
            return False
        return store.sharded_axis(tuple(variables[index].shape)) == 0

    are_parts = [is_by_rows(pool, place) for pool, place in parts.update_inputs]
    return ShardedRowUpdates.of(parts.update, are_parts, topology)


def _specs_of_outputs(
    trace: Trace, parts: StepParts, sum_axes: Sequence[int | None]
) -> list[PartitionSpec]:
    written = [
        Destination(variable).spec  # axes of a replica's devices are left to the compiler
        for variable, is_updated in zip(trace.written, parts.is_updated, strict=False)
        if not is_updated
    ]
    results = [PartitionSpec(REPLICA_AXIS)] * trace.num_outputs
    handed = [
        PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, REPLICA_AXIS)
        for axis in sum_axes
    ]
    return [*written, *results, *handed]

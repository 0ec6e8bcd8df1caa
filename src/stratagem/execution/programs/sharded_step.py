"""Steps with variables sharded over the replicas' own devices, as one program.

The step is cut into a replica part and an update part. The update follows from sums over replicas,
so it is equal on all of them, and only computes variables. It can therefore run elsewhere: once, in
the variables' store, or sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec, Sharding

from stratagem.devices.mesh import Topology
from stratagem.devices.shared_sums import is_shared_sum
from stratagem.execution.jaxprs import (
    CALLS,
    ELEMENTWISE,
    differing_values,
    free_variables,
    inner_jaxprs,
    is_replicated_work,
    leading_to,
    retrace,
    spliced,
    variables_in,
    without_unused,
)
from stratagem.execution.lookups import ShardedRowUpdates
from stratagem.execution.programs.late_gathers import shard_updates
from stratagem.execution.programs.late_step import LateStep
from stratagem.execution.programs.late_weights import Sharded
from stratagem.execution.programs.steps import (
    POOLS,
    Destination,
    IdsProgram,
    ReplicaStep,
    StepProgram,
    spec_of_input,
)
from stratagem.execution.row_effects import LINEAR
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.variables.layouts import store_of, stored_sharding
from stratagem.variables.placement import ShardedStore

if TYPE_CHECKING:
    import keras
    from jax.extend.core import JaxprEqn


# Conditional updates of variables, rewritten so that a step can be split in the middle of them.
#
# Optimizers put the new values of all variables into one `lax.cond` for gradient accumulation or
# loss
# scaling. Such an operation is in the update as a whole or not at all, and its variables would have
# to be gathered.

# Operations that cost no more than a pass over their inputs, or contain only such operations.
_ALSO_CHEAP = "concatenate cond iota reduce_and reduce_max reduce_min reduce_or slice stack"
_CHEAP = ELEMENTWISE | LINEAR | {*CALLS} | set(_ALSO_CHEAP.split())


def with_split_conditionals(
    jaxpr: Jaxpr,
    differs: dict[Any, bool],  # True for a value that may differ between replicas
    may_update: Sequence[bool],  # True if an output is a variable that the update may compute
) -> Jaxpr:
    """Splits each `cond` into the part that replicas need and the part that only updates need.

    In the second part, branches without loops and products are both computed, and an element-wise
    selection chooses. The compiler fuses these with the rest of the update, which writes each new
    value in the place of the old one. Conditionals that replicas compute with stay as they are.
    """
    stays = set(variables_in(_kept(jaxpr.outvars, [not may for may in may_update])))
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        is_needed = [variable in stays for variable in eqn.outvars]
        splits = eqn.primitive.name == "cond" and is_replicated_work(eqn, differs)
        if not splits or all(is_needed):
            eqns.append(eqn)
            stay = any(is_needed) or not is_replicated_work(eqn, differs)
            stays.update(variables_in(eqn.invars) if stay else ())
            continue
        eqns += _selections(_with_outputs(eqn, [not flag for flag in is_needed]))[::-1]
        if any(is_needed):
            eqns.append(_with_outputs(eqn, is_needed))
            stays.update(variables_in(eqns[-1].invars))
    return jaxpr.replace(eqns=eqns[::-1])


def _with_outputs(eqn: JaxprEqn, is_kept: Sequence[bool]) -> JaxprEqn:
    """Returns a `cond` that computes only some of its outputs."""
    branches: list[ClosedJaxpr] = [
        ClosedJaxpr(one.jaxpr.replace(outvars=_kept(one.jaxpr.outvars, is_kept)), one.consts)
        for one in eqn.params["branches"]
    ]
    unused = [False] * (len(eqn.invars) - 1)
    read = [without_unused(branch.jaxpr, unused)[1] for branch in branches]
    is_read = [any(flags) for flags in zip(*read, strict=True)]
    reduced = tuple(
        ClosedJaxpr(without_unused(branch.jaxpr, is_read)[0], branch.consts) for branch in branches
    )
    return eqn.replace(
        invars=[eqn.invars[0], *_kept(eqn.invars[1:], is_read)],
        outvars=_kept(eqn.outvars, is_kept),
        params={**eqn.params, "branches": reduced},
    )


def _kept(values: Sequence[Any], is_kept: Sequence[bool]) -> list[Any]:
    return [value for value, stays in zip(values, is_kept, strict=True) if stays]


def _selections(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns operations that compute all branches of a `cond` and select; itself if costly."""
    if not all(_is_cheap(branch.jaxpr) for branch in eqn.params["branches"]):
        return [eqn]
    return spliced(eqn, lambda *inputs: _selected(eqn, [*inputs]))


def _selected(eqn: JaxprEqn, inputs: list[Any], *_: bool) -> list[Any]:
    index, *operands = inputs
    branches = [
        retrace(branch, operands, rules={"cond": _selected}) for branch in eqn.params["branches"]
    ]
    return [jax.lax.select_n(index, *values) for values in zip(*branches, strict=True)]


def _is_cheap(jaxpr: Jaxpr) -> bool:
    return all(
        eqn.primitive.name in _CHEAP and all(map(_is_cheap, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


@dataclasses.dataclass(frozen=True)
class StepParts:
    """A step split in two. Outputs keep the order that they have in the step."""

    replica: Jaxpr  # inputs of the step; its other outputs, then values for the update
    update: Jaxpr  # its outputs are those of the step that are `is_updated`
    update_inputs: list[tuple[str, int]]  # ("input", i) of the step, ("handed", i) by `replica`
    is_updated: list[bool]  # for each output of the step
    num_handed: int  # trailing outputs of `replica` that are for the update


def part_step(
    jaxpr: Jaxpr,
    differing_inputs: Sequence[bool],  # True if an input may differ between replicas
    may_update: Sequence[bool],  # True if an output is a variable that the update may compute
    old_values: Mapping[int, int] | None = None,
) -> StepParts:
    """Splits a step; the update has no operations if none can be moved.

    `old_values` maps the output of a written variable to the input that holds its old value.
    """
    jaxpr = _prepared(jaxpr, differing_inputs, may_update)
    differs = differing_values(jaxpr, differing_inputs)
    moved = _moved(jaxpr, differs, may_update)
    made = {variable for eqn in moved for variable in eqn.outvars}
    is_updated = [
        may and not isinstance(atom, Literal) and atom in made
        for atom, may in zip(jaxpr.outvars, may_update, strict=True)
    ]
    # The replica part overwrites these inputs before the update runs.
    is_gone = {index for output, index in (old_values or {}).items() if not is_updated[output]}
    places = {
        variable: index for index, variable in enumerate(jaxpr.invars) if index not in is_gone
    }
    needed = free_variables(moved)
    handed = [variable for variable in needed if variable not in places]
    number = {variable: index for index, variable in enumerate(handed)}
    is_moved = {id(eqn) for eqn in moved}
    outputs = list(zip(jaxpr.outvars, is_updated, strict=True))
    return StepParts(
        replica=jaxpr.replace(
            eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in is_moved],
            outvars=[*(atom for atom, updated in outputs if not updated), *handed],
        ),
        update=jaxpr.replace(
            eqns=moved,
            invars=needed,
            outvars=[atom for atom, updated in outputs if updated],
        ),
        update_inputs=[
            ("input", places[one]) if one in places else ("handed", number[one]) for one in needed
        ],
        is_updated=is_updated,
        num_handed=len(handed),
    )


def _prepared(jaxpr: Jaxpr, differing_inputs: Sequence[bool], may_update: Sequence[bool]) -> Jaxpr:
    """Returns a step without unused operations, and without conditionals in its update."""
    all_stay = [True] * len(jaxpr.invars)
    jaxpr, _ = without_unused(jaxpr, all_stay)
    if not any(eqn.primitive.name == "cond" for eqn in jaxpr.eqns):
        return jaxpr
    differs = differing_values(jaxpr, differing_inputs)
    jaxpr, _ = without_unused(with_split_conditionals(jaxpr, differs, may_update), all_stay)
    return jaxpr


def _moved(jaxpr: Jaxpr, differs: dict[Any, bool], may_update: Sequence[bool]) -> list[Any]:
    """Returns the operations whose results are only used for new values of variables."""
    others = _kept(jaxpr.outvars, [not may for may in may_update])
    eqns = leading_to(jaxpr.eqns, others, lambda eqn: not is_replicated_work(eqn, differs))
    stays = set(map(id, eqns))
    return [eqn for eqn in jaxpr.eqns if id(eqn) not in stays]


# Reduce-scatter: replaces sums over replicas where each device needs only a shard of the result.
#
# A reduce-scatter sends half as much data as an all-reduce.

_SUMS = ("psum", "psum2", "psum_invariant")


def scatter_sums(
    parts: StepParts, stores: Sequence[ShardedStore | None], topology: Topology
) -> tuple[StepParts, list[int | None]]:
    """Removes sums that only the update reads, so that replicas output their addends.

    `stores` has the store of each value for the update, whose shard of a sum each device needs;
    None leaves a sum alone. Also returns the shard axis of each such value; None for other values.
    """
    jaxpr = parts.replica
    first = len(jaxpr.outvars) - parts.num_handed
    is_read = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
    is_read |= {id(atom) for atom in jaxpr.outvars[:first]}
    places = {id(atom): place for place, atom in enumerate(jaxpr.outvars[first:])}
    axes: list[int | None] = [None] * parts.num_handed
    outvars = list(jaxpr.outvars)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        stays: list[tuple[Any, Any]] = []
        pairs: list[Any] = (
            list(zip(eqn.invars, eqn.outvars, strict=True)) if _is_sum(eqn, topology) else []
        )
        for addend, total in pairs:
            place = None if id(total) in is_read else places.get(id(total))
            store = None if place is None else stores[place]
            axis = None if store is None else store.sharded_axis(tuple(total.aval.shape))
            if place is None or axis is None or isinstance(addend, Literal):
                stays.append((addend, total))
            else:
                axes[place], outvars[first + place] = axis, addend
        if len(stays) == len(pairs):
            eqns.append(eqn)
        elif stays:
            invars, totals = zip(*stays, strict=True)
            eqns.append(eqn.replace(invars=list(invars), outvars=list(totals)))
    return dataclasses.replace(parts, replica=jaxpr.replace(eqns=eqns, outvars=outvars)), axes


def _is_sum(eqn: JaxprEqn, topology: Topology) -> bool:
    if is_shared_sum(eqn):
        return True
    is_sum = eqn.primitive.name in _SUMS and eqn.params.get("axis_index_groups") is None
    return is_sum and tuple(eqn.params.get("axes", ())) == topology.replica_axes


# Stores whose shards of a sum over replicas an update needs.


def store_for(variable: Any, store: ShardedStore) -> ShardedStore:
    """Returns the store of a variable or, if it is replicated, of its slots."""
    own = store_of(variable)
    if isinstance(own, ShardedStore):
        return own
    return store.divided(getattr(variable, "division", None))


def stores_of_sums(
    trace: Trace, parts: StepParts, store: ShardedStore
) -> list[ShardedStore | None]:
    """Returns the store of the variable that the update computes from each value of the replicas.

    None stands for a value that is not of the shape of such a variable. A gradient belongs to
    the variable and the slots of its shape that operations of the update combine it with, directly
    or not. If there are several, or none, it is the first of this shape: the result decides where
    sums are computed, never their value.
    """
    pairs = zip(trace.written, parts.is_updated, strict=False)
    updated = [variable for variable, is_updated in pairs if is_updated]
    is_stored = [store_of(variable) is not None for variable in updated]
    by_shape: dict[Any, ShardedStore] = {}
    by_set: dict[int, ShardedStore] = {}
    sets = _sets_of_equal_shape(parts.update)
    for variable, atom, stored in zip(updated, parts.update.outvars, is_stored, strict=True):
        if stored:
            by_shape.setdefault(tuple(variable.shape), store_for(variable, store))
            by_set.setdefault(sets.of(atom), store_for(variable, store))
    found: dict[int, ShardedStore | None] = {}
    for (pool, place), atom in zip(parts.update_inputs, parts.update.invars, strict=True):
        if pool == "handed":
            shape = tuple(getattr(atom.aval, "shape", ()))
            found[place] = by_set.get(sets.of(atom), by_shape.get(shape))
    return [found.get(place) for place in range(parts.num_handed)]


class _Sets:
    """Disjoint sets of values."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def of(self, atom: object) -> int:
        """Returns the representative of a value's set."""
        key = id(atom)
        while (parent := self._parents.get(key, key)) != key:
            self._parents[key] = self._parents.get(parent, parent)
            key = parent
        return key

    def join(self, one: object, other: object) -> None:
        """Joins the sets of two values."""
        self._parents[self.of(one)] = self.of(other)


def _sets_of_equal_shape(jaxpr: Jaxpr) -> _Sets:
    """Returns sets of values of the same shape that operations connect."""
    sets = _Sets()
    for eqn in jaxpr.eqns:
        first: dict[Any, Any] = {}
        atoms: list[Any] = [*eqn.invars, *eqn.outvars]
        for atom in atoms:
            shape = getattr(atom.aval, "shape", ())
            if shape and not isinstance(atom, Literal):
                sets.join(atom, first.setdefault(shape, atom))
    return sets


_Pools = Mapping[str, Sequence[Any]]


def is_sharded(trace: Trace, topology: Topology) -> bool:
    """True if all stored variables of a step are sharded over its devices."""
    return all(
        isinstance(store, ShardedStore) and store.topology == topology for store in _stores(trace)
    )


class ShardedStep(ReplicaStep):
    """The replicas' computation and a sharded update, on global arrays.

    Sums that only the update reads are reduce-scattered. Rows of tables are exchanged within the
    program. Each device copies its own shards from and to pinned host memory.
    """

    def __init__(self, trace: Trace, topology: Topology, name: str) -> None:
        self._store: ShardedStore = _stores(trace)[0]
        trace = _with_tables(trace)
        super().__init__(trace, topology)
        self._exchanged = _ExchangedRows(trace, topology, name) if trace.lookups else None
        parts, sums = _parts_of(trace, self._store, topology)
        self.parts, self._late = _late_step(trace, parts, sums, topology)
        self._owners = _owners_of_shards(trace)
        self.update = _update_of(trace, self.parts, topology)
        self._specs = _specs_of_outputs(trace, self.parts, sums, topology)

    def mapped(self, *, many: bool) -> Callable[..., Any]:
        """Returns the function of the arrays of all replicas."""
        return self.many_steps if many else self.one_step

    def programs(self, arguments: Arguments, name: str) -> list[StepProgram]:
        """Returns the one program, with the transfers from and to pinned memory."""
        (program,) = super().programs(arguments, name)
        written, read_only = program.shapes[:2]
        put_back = _pinned(self.trace.written, written)
        brought = [*put_back, *_pinned(self.trace.read_only, read_only)]
        return [dataclasses.replace(program, brought=brought, put_back=put_back)]

    def row_shapes(self, split: Sharding) -> list[jax.ShapeDtypeStruct]:
        """Returns nothing: rows are exchanged within the program."""
        return []

    def out_shardings(self) -> Any:
        """Returns output shardings."""
        topology = self.topology
        written = [*map(self.sharding, self.trace.written)]
        split = topology.stacked if topology.num_replicas > 1 else topology.replicated
        return written, split, topology.replicated, topology.replicated

    def value(self, variable: Any) -> Any:
        """Returns a variable's value as it is stored."""
        return super().value(variable) if store_of(variable) is None else variable.stored

    def sharding(self, variable: Any) -> Sharding:
        """Returns the sharding of a variable as an input or output of the step."""
        store = store_of(variable)
        return super().sharding(variable) if store is None else store.sharding(variable.shape)

    def one_step(self, *arrays: list[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
        """Runs one step on global arrays."""
        pools: dict[str, Sequence[Any]] = dict(zip(POOLS, arrays, strict=True))
        pools["written"] = [*map(_loaded, self.trace.written, pools["written"])]
        pools["read_only"] = [*map(_loaded, self.trace.read_only, pools["read_only"])]
        if self._exchanged is not None:
            pools["rows"] = self._exchanged.rows(pools)
        inputs = [pools[source][index] for source, index in self.trace.inputs]
        outputs, of_shards = self._computed_by_replicas(inputs)
        num_others = self._late.first_handed
        handed = {place - num_others: value for place, value in outputs.items()}
        of_update = {"input": inputs, "handed": handed}
        update_inputs = [of_update[pool][place] for pool, place in self.parts.update_inputs]
        shards = {
            place: value
            for update, values in zip(self._late.updates, of_shards, strict=True)
            for place, value in zip(update.outputs, values, strict=True)
        }
        rest = iter(self.update.values(update_inputs))
        places = iter(range(sum(self.parts.is_updated)))
        others = iter([outputs[place] for place in range(num_others)])
        values = [
            self._updated(one, shards[place] if (place := next(places)) in shards else next(rest))
            if is_updated
            else _unloaded(one, next(others))
            for one, is_updated in zip(self.trace.written, self.parts.is_updated, strict=False)
        ]
        return values, list(others), self.token(pools), []

    def _computed_by_replicas(self, inputs: Sequence[Any]) -> tuple[dict[int, Any], list[Any]]:
        """Returns the outputs of the replicas by place, and the new shards of each shard update."""
        places, returned = self._late.read_inputs, self._late.returned

        def run(values: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
            return self._late.outputs(dict(zip(places, values, strict=True)))

        if self.topology.num_replicas > 1:
            specs = [
                spec_of_input(*self.trace.inputs[place], self.trace, self.topology)
                if (sharded := self._late.shards[place]) is None
                else sharded.spec
                for place in places
            ]
            of_updates = [[one.sharded.spec] * len(one.outputs) for one in self._late.updates]
            run = jax.shard_map(
                run,
                mesh=self.topology.mesh,
                in_specs=(specs,),
                out_specs=([self._specs[place] for place in returned], of_updates),
                axis_names={*self.topology.replica_axes},
                check_vma=False,
            )
        # Values that the replicas do not read are not sent to them.
        outputs, updated = run([inputs[place] for place in places])
        return dict(zip(returned, outputs, strict=True)), updated

    def _updated(self, variable: Any, value: jax.Array) -> Any:
        """Returns a new value in its store; each device computes one shard."""
        if store_of(variable) is None:  # replicated
            if id(variable) in self._owners:
                store = store_for(variable, self._store)
                parted = store.compute_sharding(tuple(variable.shape))
                value = jax.lax.with_sharding_constraint(value, parted)
            return jax.lax.with_sharding_constraint(value, self.sharding(variable))
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
    return [store for one in trace.variables if (store := store_of(one)) is not None]


def _with_tables(trace: Trace) -> Trace:
    """Adds tables used only by lookups to the read-only variables of a trace."""
    known = {id(variable) for variable in (*trace.written, *trace.read_only)}
    tables = {id(one.table): one.table for one in trace.lookups if id(one.table) not in known}
    return dataclasses.replace(trace, read_only=[*trace.read_only, *tables.values()])


def _owners_of_shards(trace: Trace) -> set[int]:
    """Returns the ids of the variables with sharded slots."""
    return {id(getattr(one, "slot_of", None)) for one in trace.written if store_of(one)}


def _parts_of(
    trace: Trace, store: ShardedStore, topology: Topology
) -> tuple[StepParts, list[Sharded | None]]:
    """Splits a step into replica part and update.

    Also returns how each value for the update is sharded if it is a reduce-scattered sum.
    """
    jaxpr = trace.jaxpr.jaxpr
    outvars = jaxpr.outvars[: len(trace.written) + trace.num_outputs]  # without the ids
    # Copies, too: they may depend on values of all gradients, such as their norm.
    copied = topology.replicated.spec
    may_update = [
        store_of(one) is not None or stored_sharding(one, topology).spec == copied
        for one in trace.written
    ]
    may_update += [False] * trace.num_outputs
    parts = part_step(jaxpr.replace(outvars=outvars), trace.differing_inputs, may_update)
    stores = stores_of_sums(trace, parts, store)
    parts, axes = scatter_sums(parts, stores, topology)
    return parts, [
        None if axis is None or one is None else Sharded(axis, _logical_spec(one), topology)
        for axis, one in zip(axes, stores, strict=True)
    ]


def _logical_spec(store: Any) -> PartitionSpec:
    """Returns how a replica's devices shard the value that they have together."""
    return PartitionSpec() if store.division is None else store.division.logical_spec


def _update_of(trace: Trace, parts: StepParts, topology: Topology) -> ShardedRowUpdates:
    def is_by_rows(pool: str, place: int) -> bool:
        return pool == "input" and _sharded_axis(trace, *trace.inputs[place]) == 0

    are_parts = [is_by_rows(pool, place) for pool, place in parts.update_inputs]
    return ShardedRowUpdates.of(parts.update, are_parts, topology)


def _specs_of_outputs(
    trace: Trace, parts: StepParts, sums: Sequence[Sharded | None], topology: Topology
) -> list[PartitionSpec]:
    written = [
        Destination(variable, topology).spec  # axes of a replica's devices are left to the compiler
        for variable, is_updated in zip(trace.written, parts.is_updated, strict=False)
        if not is_updated
    ]
    results = [PartitionSpec(topology.replica_axis)] * trace.num_outputs
    handed = [PartitionSpec() if one is None else one.spec for one in sums]
    return [*written, *results, *handed]


def _late_step(
    trace: Trace, parts: StepParts, sums: Sequence[Sharded | None], topology: Topology
) -> tuple[StepParts, LateStep]:
    """Takes the updates that each device computes for its own shards out of a step's update."""
    shards = [_sharded_input(*source, trace, topology) for source in trace.inputs]

    def sharded(source: tuple[str, int]) -> Sharded | None:
        return shards[source[1]] if source[0] == "input" else sums[source[1]]

    updates = shard_updates(parts.update, parts.update_inputs, sharded)
    done = {place for one in updates for place in one.outputs}
    outvars = [atom for place, atom in enumerate(parts.update.outvars) if place not in done]
    rest, stays = without_unused(
        parts.update.replace(outvars=outvars), [False] * len(parts.update.invars)
    )
    rest_inputs = [one for one, stay in zip(parts.update_inputs, stays, strict=True) if stay]
    first = len(parts.replica.outvars) - parts.num_handed
    step = LateStep(
        parts.replica,
        shards,
        is_steady=[source in ("written", "read_only", "constant") for source, _ in trace.inputs],
        sums={first + place: one for place, one in enumerate(sums) if one is not None},
        updates=updates,
        first_handed=first,
        returned=[
            *range(first),
            *sorted({first + place for pool, place in rest_inputs if pool == "handed"}),
        ],
    )
    return dataclasses.replace(parts, update=rest, update_inputs=rest_inputs), step


def _sharded_input(source: str, index: int, trace: Trace, topology: Topology) -> Sharded | None:
    """Returns how a variable that is an input is sharded; None for other inputs."""
    axis = _sharded_axis(trace, source, index)
    if axis is None or topology.num_replicas == 1:
        return None
    return Sharded(axis, _logical_spec(store_of(trace.variable(source, index))), topology)


def _sharded_axis(trace: Trace, source: str, index: int) -> int | None:
    if (variable := trace.variable(source, index)) is None:
        return None
    store = store_of(variable)
    return store.sharded_axis(tuple(variable.shape)) if isinstance(store, ShardedStore) else None

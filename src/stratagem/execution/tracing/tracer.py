"""Tracer of replica functions: makes a `Trace` whose inputs and outputs include variables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from stratagem import contexts as stack
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.jaxprs import differing_outputs, may_wait_for_ever, without_unused
from stratagem.execution.replica_context import ReplicaContext
from stratagem.execution.summary.collector import CollectedSummaries, Collector
from stratagem.execution.tracing.arguments import Arguments, Results
from stratagem.execution.tracing.errors import (
    BRANCHING,
    call_with_copies,
    captured_explicit,
    created_again,
    disagreement,
    foreign_variable,
    name_of,
    parted,
)
from stratagem.execution.tracing.functionalize import (
    ReplicaScope,
    Trace,
    initialize_created_variables,
    is_uninitialized,
)
from stratagem.execution.tracing.remote_state import (
    UNTOUCHED,
    Ids,
    Lookup,
    Summand,
    SumOverWorkers,
    chained_tables,
    gets_rows,
    inputs_of,
    local_jaxpr,
    without_unused_variables,
)
from stratagem.logs import warn_on_one_worker
from stratagem.variables.components import agree_on_initial_values
from stratagem.variables.distributed import PerReplica, is_distributed
from stratagem.variables.registry import Home, VariableKind, VariableRegistry, home_of
from stratagem.variables.sharded_variable import ShardedVariable

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts

# Agreement of replicas: checks assigned values and results that must be equal on all replicas.


def use_agreement(trace: Trace, unproven: Set[int], strategy: object) -> None:
    """Checks that `unproven` variables, by id, are assigned equal values on all replicas.

    Also clears row lengths of results that are equal on all replicas (summed, gathered): they are
    not one replica's rows, even if their leading size happens to match a padded part.
    """
    lengths = trace.results.lengths
    has_cut = any(one is not None for one in lengths)
    if not (unproven or has_cut):
        return
    flags = differing_outputs(trace.jaxpr.jaxpr, trace.differing_inputs)
    for variable, differs in zip(trace.written, flags, strict=False):
        if differs and id(variable) in unproven:
            raise disagreement(variable, strategy)
    result_flags = flags[len(trace.written) :]
    for position, (is_output, output) in enumerate(trace.results.leaves):
        if is_output and not result_flags[output]:
            lengths[position] = None


# Sequence parallelism: the arguments of a step in parts, over the devices of a replica.


def split_sequences(strategy: StrategyParts, arguments: Any) -> Any:
    """Splits the sequence axis of a replica's arguments, if the strategy has one.

    The compiler then computes all that follows in parts. Arrays without the axis, or with one of
    size 1, stay whole; so do those that cannot be divided evenly, with a warning.
    """
    axis, topology = strategy.sequence_axis, strategy.topology
    if axis is None or topology.num_logical_devices == 1:
        return arguments
    return jax.tree.map(lambda value: _split(value, axis, topology), arguments)


def _split(value: Any, axis: int, topology: Topology) -> Any:
    shape = jnp.shape(value) if isinstance(value, jax.Array) else ()
    if len(shape) <= axis or shape[axis] == 1:
        return value
    if shape[axis] % topology.num_logical_devices:
        _warn_of_uneven(shape, axis, topology.num_logical_devices)
        return value
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec(*[None] * axis, topology.logical_axes)
    sharding = NamedSharding(topology.mesh if mesh.empty else mesh, spec)
    return jax.lax.with_sharding_constraint(value, sharding)


def _warn_of_uneven(shape: tuple[int, ...], axis: int, count: int) -> None:
    warn_on_one_worker(
        explain(
            f"An argument of shape {shape} cannot be divided along sequence_axis={axis}: "
            f"{shape[axis]} over {count} devices. Each device computes all of it.",
            expected="a length that is a multiple of the number of devices of a replica.",
            fix=f"pad sequences to a multiple of {count}. Results are the same.",
        ),
        stacklevel=2,
    )


# Results of a step as values: variables are read, and dataclasses become pytrees.


def as_values(result: object, late: Callable[[Any], bool] = lambda _: False) -> Any:
    """Returns a result with each variable replaced by its current value.

    Call it at the end of the step, while variables still return this replica's values. Variables
    that are `late` stay, because servers change them after the step. Containers that are leaves to
    JAX become pytrees: Keras's tracked ones and other subclasses of list, tuple and dict become
    plain; dataclasses become a `_Record`, which unflattens to the dataclass.
    """
    return jax.tree.map(functools.partial(_as_value, late), result, is_leaf=is_distributed)


def rebuilt(values: object) -> Any:
    """Returns the result of `as_values` with its dataclasses restored."""
    return jax.tree.map(lambda leaf: leaf, values, is_leaf=is_distributed)


def _as_value(late: Callable[[Any], bool], leaf: object) -> Any:
    if isinstance(leaf, keras.Variable | ShardedVariable):
        return leaf if late(leaf) else leaf.value
    items = None if is_distributed(leaf) else _items(leaf)
    if items is None:
        return leaf
    values = as_values(items, late)
    if not any(map(_is_value, jax.tree.leaves(values))):
        return leaf
    return _Record(type(leaf), values) if dataclasses.is_dataclass(leaf) else values


def _items(leaf: object) -> Any:
    """Returns the contents of a container that JAX treats as a leaf; None for other leaves."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    for kind in (list, tuple):
        if isinstance(leaf, kind):
            return kind(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | keras.Variable)


@dataclasses.dataclass
class _Record:
    """A dataclass that is not registered with JAX, as a pytree of its fields."""

    kind: type
    fields: dict[str, Any]


def _dataclass(kind: type, fields: Any) -> Any:
    record: Any = object.__new__(kind)
    for name, value in fields[0].items():
        object.__setattr__(record, name, value)
    return record


jax.tree_util.register_pytree_node(
    _Record, lambda record: ((record.fields,), record.kind), _dataclass
)


# Source of the input that is true if summaries are recorded.
_RECORDS = ("records", 0)


class _Recorder:
    """Runs the function once under a trace and records its reads and writes of variables."""

    def __init__(
        self,
        strategy: StrategyParts,
        fn: Callable[..., Any],
        arguments: Arguments,
        foreign: list[Any],
        lookups: Sequence[Lookup] = (),
        whole_tables: frozenset[int] = frozenset(),
    ) -> None:
        self._strategy = strategy
        self._fn = fn
        self.arguments = arguments
        self._topology: Topology = strategy.topology
        self._registry: VariableRegistry = strategy.variables
        slots = getattr(fn, "slots", ())  # storage of a CarryingStep
        self.candidates: list[Any] = [*self._registry.live(), *slots, *foreign]
        self.missed: dict[int, Any] = {}
        self.came_late = False  # True if variables of the strategy are no candidates yet
        self.read_ids: set[int] = set()
        self.written: list[Any] = []
        self.unproven: set[int] = set()
        self.results: Any = None
        self.result_shapes: list[tuple[int, ...]] = []  # of its arrays
        self._gets_rows = gets_rows(strategy)
        self.expected_lookups = list(lookups)
        self._whole_tables = whole_tables
        self.lookups: list[Lookup] = []
        self.sent: list[Any] = []
        self.added_to: frozenset[int] = frozenset()
        self.preparations: list[Callable[[], None]] = []
        self.num_writes: Mapping[int, int] = {}
        self.early: list[Any] = []
        self.summaries: CollectedSummaries | None = None

    def is_stacked(self, variable: object) -> bool:
        home = home_of(variable)
        return (
            home is not None
            and home.strategy is self._strategy
            and home.kind is VariableKind.ON_READ
        )

    def body(
        self, state: dict[str, list[Any]], split: list[Any], shared: list[Any], records: object
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Runs one replica; passed to `shard_map`, so it takes and returns local arrays."""
        several = self._topology.num_replicas > 1
        values = self._local_values(state)
        own = [part[0] for part in split] if several else split
        args, kwargs = split_sequences(self._strategy, self.arguments.rebuild(own, shared))
        context = self._context(several)
        remote = self._strategy.placement.remote
        scope = ReplicaScope(lambda variable: self._read(variable, values), remote)
        if self._gets_rows:
            rows = [part[0] for part in state["rows"]] if several else state["rows"]
            scope.receive = lambda lookup: self._receive(_after_updates(lookup, scope), rows)
            scope.whole_tables = self._whole_tables
        in_replica = stack.push(stack.FrameKind.REPLICA, self._strategy, context)
        with in_replica, scope, Collector(records) as summaries:
            try:
                result = call_with_copies(self._fn, args, kwargs)
                values_of_result = as_values(result, scope.is_late)
                self.results, outputs = Results.of(values_of_result, self.arguments.batch)
            except jax.errors.ConcretizationTypeError as error:
                error.add_note(BRANCHING)
                raise
        self.result_shapes = [output.shape for output in outputs]
        self.read_ids = scope.read_ids
        self.written = list(scope.writes.values())
        self.unproven = set(scope.unproven)
        for variable in self.written:
            if id(variable) not in values:
                self._note_missed(variable)
        copied, stacked = list[Any](), list[Any]()
        for variable in self.written:
            value = scope.written_value(variable)
            if self.is_stacked(variable):
                stacked.append(value[None])
            else:
                copied.append(value)
        of_summaries, self.summaries = summaries.results()
        self.sent = [what for what, _ in scope.sent]
        self.num_writes, self.early = scope.num_writes, [variable for variable, _ in scope.early]
        outputs += [*of_summaries, *(value for _, value in [*scope.sent, *scope.early])]
        self.added_to = frozenset(scope.added_to)
        self.preparations = scope.preparations
        return copied, stacked, [value[None] for value in outputs] if several else outputs

    def _receive(self, lookup: Lookup, rows: list[Any]) -> tuple[int, Any]:
        """Returns the index and rows of a lookup; zeros until the function is retraced with it."""
        place, expected = len(self.lookups), self.expected_lookups
        self.lookups.append(lookup)
        if place < len(expected) and expected[place].is_like(lookup):
            return place, lookup.received(rows[len(inputs_of(expected[:place])) :])
        return place, lookup.received([jnp.zeros(one.shape, one.dtype) for one in lookup.inputs])

    @property
    def has_new_lookups(self) -> bool:
        """True if the function made lookups that were not expected."""
        return len(self.lookups) != len(self.expected_lookups) or not all(
            map(Lookup.is_like, self.lookups, self.expected_lookups)
        )

    def _context(self, several: bool) -> ReplicaContext:
        if not several:
            return ReplicaContext(
                self._strategy,
                0,
                SoleCommunicator(marks_sums=self._strategy.placement.uses_stores),
                self.arguments.batch,
            )
        communicator = self._strategy.cross_device_ops.communicator(self._topology)
        replica_id = jax.lax.axis_index(self._topology.replica_axis)
        return ReplicaContext(self._strategy, replica_id, communicator, self.arguments.batch)

    def _local_values(self, state: dict[str, list[Any]]) -> dict[int, Any]:
        copied, stacked = iter(state["copied"]), iter(state["stacked"])
        return {
            id(variable): next(stacked) if self.is_stacked(variable) else next(copied)
            for variable in self.candidates
        }

    def _read(self, variable: object, values: dict[int, Any]) -> Any:
        value = values.get(id(variable))
        if value is not None:  # index only variables that are read
            return value[0] if self.is_stacked(variable) else value
        self._note_missed(variable)
        return None

    def _note_missed(self, variable: object) -> None:
        home: Home | None = home_of(variable)
        if home is None:
            self.missed[id(variable)] = variable
        elif home.strategy is not self._strategy:
            stack.note_use()
            raise foreign_variable(variable, home.strategy, self._strategy)
        elif any(variable is one for one in self._registry.live()):
            self.came_late = True  # from another thread


def _with_stages_of_sums(
    jaxpr: ClosedJaxpr,
    inputs: list[tuple[str, int]],
    lookups: list[Lookup],
    sent: list[Any],
) -> list[Lookup]:
    """Returns the lookups with the place in the step at which each sum over workers is known.

    Summands that are sent one after another are added up together, unless one needs another's sum.
    """
    places = [place for place, one in enumerate(sent) if isinstance(one, Summand)]
    if not places:
        return lookups
    owners = [lookup for lookup in lookups for _ in lookup.inputs]
    first = len(jaxpr.jaxpr.outvars) - len(sent)
    summands = [jaxpr.jaxpr.outvars[first + place] for place in places]
    _, stays = without_unused(
        jaxpr.jaxpr.replace(outvars=summands), [False] * len(inputs), keeps_effects=False
    )
    used = [
        owners[index]
        for (source, index), stay in zip(inputs, stays, strict=True)
        if stay and source == "rows"
    ]
    are_chained = any(isinstance(one, SumOverWorkers) for one in used)
    lookups, last = [*lookups], places[-1]
    for place in reversed(places):
        is_joined = all(isinstance(one, Summand | Ids) for one in sent[place : last + 1])
        last = last if is_joined and not are_chained else place
        lookup = sent[place].lookup
        lookups[lookup] = dataclasses.replace(lookups[lookup], after=last + 1)
    return lookups


def _after_updates(lookup: Lookup, scope: ReplicaScope) -> Lookup:
    """Returns a lookup with the place in the step at which its table has the rows."""
    after = scope.updated_after.get(id(lookup.table), 0)
    return lookup if after == lookup.after else dataclasses.replace(lookup, after=after)


def trace_replica_function(
    strategy: StrategyParts,
    fn: Callable[..., Any],
    arguments: Arguments,
    topology: Topology | None = None,
) -> Trace:
    """Traces a replica function, and retraces it if it uses variables not seen before.

    `topology` has as many devices as replicas; None means the strategy's own.
    """
    foreign: list[Any] = []
    lookups: list[Lookup] = []
    whole_tables: frozenset[int] = frozenset()
    has_created = False
    name = name_of(fn)
    builds: list[BuildWrites] = []
    while True:
        recorder = _Recorder(strategy, fn, arguments, foreign, lookups, whole_tables)
        try:
            closed = _make_jaxpr(recorder, topology or strategy.topology, arguments)
        except NotImplementedError as error:
            if "Closing over" in str(error) and "Explicit" in str(error):
                raise captured_explicit(name) from error
            raise
        # Under the default strategy they are in no registry.
        created = [*filter(is_uninitialized, recorder.missed.values())]
        created += strategy.variables.uninitialized()
        has_more = bool(created or recorder.missed or recorder.came_late)
        if not has_more and recorder.has_new_lookups:
            lookups = recorder.lookups
            continue
        if not has_more:
            for prepare in recorder.preparations:
                prepare()
            trace = _finish(recorder, strategy, arguments, closed)
            # Fetch whole tables whose ids are not known before the step.
            if strategy.placement.uses_stores and (chained := chained_tables(trace)):
                whole_tables, lookups = whole_tables | chained, []
                continue
            if any(lengths is not None for lengths in trace.results.lengths):
                larger = _Recorder(strategy, fn, arguments.with_another_row(), foreign)
                _keep_rows_only(trace, larger, topology or strategy.topology)
            for build in builds:
                build.keep(strategy, recorder.num_writes, arguments)
            return trace
        if created and has_created:
            raise created_again(created[0])
        if recorder.early:
            trace = _trace_of(recorder, strategy, arguments, closed, [])
            builds.append(BuildWrites.of(name, recorder.early, recorder.num_writes, trace))
        has_created = bool(created)
        initialize_created_variables(strategy)
        foreign = [*foreign, *recorder.missed.values()]


def _make_jaxpr(recorder: _Recorder, topology: Topology, arguments: Arguments) -> Any:
    state: dict[str, list[Any]] = {"copied": [], "stacked": [], "rows": []}
    for variable in recorder.candidates:
        stacked = recorder.is_stacked(variable)
        shape = (topology.num_replicas, *variable.shape) if stacked else variable.shape
        state["stacked" if stacked else "copied"].append(
            jax.ShapeDtypeStruct(shape, variable.dtype)
        )
    several = topology.num_replicas > 1
    for one in inputs_of(recorder.expected_lookups):
        shape = (topology.num_replicas, *one.shape) if several else one.shape
        state["rows"].append(jax.ShapeDtypeStruct(shape, one.dtype))
    split = [leaf.aval for leaf in arguments.leaves if leaf.split]
    shared = [leaf.aval for leaf in arguments.leaves if not leaf.split and leaf.aval is not None]
    body: Callable[..., Any] = recorder.body
    if several:
        copied, stacked_spec = PartitionSpec(), PartitionSpec(topology.replica_axis)
        of_state = {"copied": copied, "stacked": stacked_spec, "rows": stacked_spec}
        body = jax.shard_map(
            recorder.body,
            mesh=topology.mesh,
            in_specs=(of_state, stacked_spec, copied, copied),
            out_specs=(copied, stacked_spec, stacked_spec),
            axis_names={*topology.replica_axes},
            check_vma=False,
        )
    return jax.make_jaxpr(body)(state, split, shared, np.False_)


def _finish(
    recorder: _Recorder, strategy: StrategyParts, arguments: Arguments, closed: ClosedJaxpr
) -> Trace:
    trace = _trace_of(recorder, strategy, arguments, closed, recorder.written)
    if strategy.num_replicas_in_sync > 1:
        if may_wait_for_ever(trace.jaxpr.jaxpr, trace.differing_inputs):
            raise parted(strategy)
        use_agreement(trace, recorder.unproven, strategy)
    return trace


def _trace_of(
    recorder: _Recorder,
    strategy: StrategyParts,
    arguments: Arguments,
    closed: ClosedJaxpr,
    variables: list[Any],
) -> Trace:
    """Returns the trace whose first outputs are new values of the given variables."""
    ordered = sorted(recorder.candidates, key=recorder.is_stacked)
    num_copied = sum(not recorder.is_stacked(variable) for variable in ordered)
    written = sorted(variables, key=recorder.is_stacked)  # the order of the outputs
    written_ids = {id(variable): index for index, variable in enumerate(written)}
    touched = [v for v in ordered if id(v) in recorder.read_ids and id(v) not in written_ids]
    read_only_ids = {id(variable): index for index, variable in enumerate(touched)}
    sources: list[tuple[str, int]] = []
    for variable in ordered:
        if id(variable) in written_ids:
            sources.append(("written", written_ids[id(variable)]))
        else:
            place = read_only_ids.get(id(variable))
            sources.append(UNTOUCHED if place is None else ("read_only", place))
    # JAX flattens dicts by sorted keys: copied, rows, stacked.
    sources[num_copied:num_copied] = [("rows", i) for i in range(len(inputs_of(recorder.lookups)))]
    sources += [("split", index) for index in range(len(arguments.split))]
    sources += [("shared", index) for index in range(len(arguments.shared))]
    sources.append(UNTOUCHED if (summaries := recorder.summaries) is None else _RECORDS)
    jaxpr, inputs, constants = local_jaxpr(closed, sources, strategy.topology)
    if summaries is not None:
        inputs = [("constant", len(constants)) if one == _RECORDS else one for one in inputs]
        constants.append(np.False_)
    lookups, sent = recorder.lookups, recorder.sent
    if gets_rows(strategy):
        jaxpr, inputs, touched, kept = without_unused_variables(jaxpr, inputs, touched, lookups)
        places = {place: new for new, place in enumerate(kept)}
        lookups = [lookups[place] for place in kept]
        sent = [
            dataclasses.replace(one, lookup=places[one.lookup])
            if isinstance(one, Ids | Summand)
            else one
            for one in sent
        ]
        lookups = _with_stages_of_sums(jaxpr, inputs, lookups, sent)
    return Trace(
        jaxpr=jaxpr,
        read_only=touched,
        written=written,
        inputs=inputs,
        constants=constants,
        results=recorder.results,
        lookups=lookups,
        sent=sent,
        added_to=recorder.added_to,
        summaries=summaries,
        records=None if summaries is None else len(constants) - 1,
        splits_sequences=strategy.sequence_axis is not None,
        lock=strategy.variables.lock,
    )


def _keep_rows_only(trace: Trace, larger: _Recorder, topology: Topology) -> None:
    """Clears row lengths of results whose leading size equals the padded size by chance.

    Rows grow with the padded part. If the function rejects another size, nothing changes.
    """
    try:
        _make_jaxpr(larger, topology, larger.arguments)
    except Exception:  # noqa: BLE001 - it accepts the size that it will run with
        return
    lengths = trace.results.lengths
    for position, (is_output, output) in enumerate(trace.results.leaves):
        if lengths[position] is None or not is_output:
            continue
        shape = larger.result_shapes[output]
        if not shape or shape[0] != larger.arguments.batch.size:
            lengths[position] = None


# Build writes: values that a layer's build assigns to the variables it creates in a step.
#
# The trace that creates variables is discarded, and the next one finds them built, so the build's
# assignments would be lost. The first trace therefore records assignments to variables without a
# value. A variable's first ones, as many as the next trace does not repeat, are the build's.


def lost_writes(
    early: list[Any], num_early: Mapping[int, int], num_writes: Mapping[int, int]
) -> dict[int, int]:
    """Returns, for each variable assigned by a build, the index of its last such assignment.

    `early` is the variable of each assignment in the first trace; the counts are by id.
    """
    lost: dict[int, int] = {}
    for key in dict.fromkeys(map(id, early)):
        places = [place for place, variable in enumerate(early) if id(variable) == key]
        num_lost = num_early[key] - num_writes.get(key, 0)
        if num_lost > 0:
            lost[key] = places[num_lost - 1]
    return lost


def store_initial(variable: keras.Variable, value: object) -> None:
    """Sets the initial value of a new variable: `PerReplica`, or one value for all replicas."""
    home = home_of(variable)
    if home is not None and home.kind is VariableKind.ON_READ:
        if not isinstance(value, PerReplica):
            topology = home.strategy.topology
            value = PerReplica(stacked=topology.stack([value] * topology.num_local_replicas))
        variable.storage = value.stacked
        return
    value = np.array(value.components[0] if isinstance(value, PerReplica) else value)
    if home is None:
        variable.assign(value)
    else:
        variable.store_whole(value)


@dataclasses.dataclass
class BuildWrites:
    """The assignments of a first trace, as a program whose results are their values."""

    name: str  # of the replica function
    variables: list[Any]  # of each assignment
    num_writes: Mapping[int, int]  # assignments to each variable, by id
    trace: Trace

    @classmethod
    def of(
        cls, name: str, variables: list[Any], num_writes: Mapping[int, int], trace: Trace
    ) -> BuildWrites:
        """Extracts the assignments from the first trace, whose last outputs are the values."""
        jaxpr = trace.jaxpr.jaxpr
        jaxpr = jaxpr.replace(outvars=jaxpr.outvars[len(jaxpr.outvars) - len(variables) :])
        reduced, stays = without_unused(jaxpr, [False] * len(trace.inputs), keeps_effects=False)
        inputs = [one for one, stay in zip(trace.inputs, stays, strict=True) if stay]
        closed, inputs, read_only, _ = without_unused_variables(
            ClosedJaxpr(reduced, []), inputs, trace.read_only
        )
        places = list(range(len(variables)))
        values = Trace(
            jaxpr=closed,
            read_only=read_only,
            written=[],
            inputs=inputs,
            constants=trace.constants,
            results=Results(
                jax.tree.structure(places),
                [(True, place) for place in places],
                [None] * len(places),
            ),
        )
        return cls(name, variables, num_writes, values)

    def keep(
        self,
        strategy: StrategyParts,
        num_writes: Mapping[int, int],
        arguments: Arguments,
    ) -> None:
        """Stores the values that the build assigned and the next trace does not assign again.

        Raises RuntimeError if they depend on rows of a table.
        """
        lost = lost_writes(self.variables, self.num_writes, num_writes)
        topology = strategy.topology
        if not lost or topology.is_abstract or not strategy.executor.has_values:
            return
        sources = {source for source, _ in self.trace.inputs}
        if "rows" in sources:
            first = self.variables[next(iter(lost.values()))]
            raise RuntimeError(
                explain(
                    f"The build of variable {first.path!r} assigns it a value that depends on rows "
                    "of a table.",
                    expected="a value that depends only on other variables and on arguments.",
                    fix="build the model first: model.build(input_shape) in the scope.",
                )
            )
        agree_on_initial_values(strategy.variables, topology)
        needs_arguments = bool(sources & {"split", "shared"})
        split, shared = (arguments.split, arguments.shared) if needs_arguments else ([], [])
        values = strategy.executor.evaluate(self.trace, self.name, split, shared)
        for place in lost.values():
            store_initial(self.variables[place], values[place])

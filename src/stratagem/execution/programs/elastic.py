"""Executor of an elastic group: a step that a lost member has broken is run again by the others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec, Sharding

from stratagem import config
from stratagem.devices.elastic_rounds import RoundOperation, Rounds, error_of_rounds
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.errors import explain, invalid
from stratagem.execution.jaxprs import Rule, retrace
from stratagem.execution.programs.convolutions import fast_on_cpu
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.execution.programs.program import Program
from stratagem.execution.programs.steps import POOLS, Destination, ReplicaStep
from stratagem.execution.tracing.arguments import Arguments, batch_arguments, flatten_arguments
from stratagem.execution.tracing.errors import name_of, operations_digest
from stratagem.execution.tracing.functionalize import Trace
from stratagem.group.current import current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import DivergedError
from stratagem.input.batches import HostBatch, split_again
from stratagem.input.placement import place as placed_batches
from stratagem.resources import setting
from stratagem.variables.distributed import PerReplica, is_per_replica
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts

# Variables of no strategy that the steps of an elastic group use.
#
# A process that joins receives the values of those that its steps use by then.


class OutsideVariables:
    """Variables of no strategy, in the order of their first use."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._is_complete = False

    def __iter__(self) -> Iterator[Any]:
        for reference in self._references:
            variable = reference()
            if variable is not None:
                yield variable

    def end(self) -> None:
        """Refuses others from now on: this process has joined, and received the values of these."""
        self._is_complete = True

    def note(self, variables: Sequence[Any], name: str) -> None:
        """Notes those of a step's variables; raises ValueError for others after `end`."""
        for variable in variables:
            if home_of(variable) is not None or any(variable is one for one in self):
                continue
            if self._is_complete:
                raise invalid(
                    f"{name} uses variable {variable.path!r}, which was made outside of the "
                    "strategy's scope. This process joined the others, and did not receive "
                    "its value.",
                    expected="a variable of the strategy, or of a step that was compiled "
                    "before joining.",
                    fix="make it in strategy.scope(); an optimizer has variables as well. Or "
                    "pass the step to strategy.admit(fn, args).",
                )
            self._references.append(weakref.ref(variable))


# The devices that this thread compiles a step for; None for those of the present members. Other
# threads read batches meanwhile, for the present ones.
expected: ContextVar[Topology | None] = ContextVar("devices of expected members", default=None)


class ElasticLockstep(Lockstep):
    """Runs replica functions on the members that are left."""

    def __init__(self, strategy: StrategyParts, *, steps_per_call: int | None = None) -> None:
        super().__init__(strategy, steps_per_call=steps_per_call)
        self._topology: Topology = strategy.topology
        self._by_size: dict[int, OrderedDict[Any, Any]] = {}
        self._noted_size = self._topology.num_replicas
        self._larger: dict[tuple[Any, int], ElasticProgram] = {}
        self._prepared = set[Any]()  # functions that were compiled for one member less
        given = getattr(strategy, "executor", None)  # each `fit` has an executor of its own
        is_first = not isinstance(given, ElasticLockstep)
        self.outside_variables = OutsideVariables() if is_first else given.outside_variables

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function once per replica, again if a member is lost."""
        _refuse_eager(fn)
        return self._run_until_committed(fn, lambda: self._flattened(args, kwargs))

    def _flattened(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        topology = self._strategy.topology
        own_args, own_kwargs = jax.tree.map(
            functools.partial(_on, topology), (tuple(args), kwargs), is_leaf=is_per_replica
        )
        return flatten_arguments(own_args, own_kwargs, num_replicas=topology.num_replicas)

    def run_batches(
        self, fn: Callable[..., Any], batches: list[HostBatch], arguments: Arguments | None
    ) -> Any:
        """Calls a function on batches, each of which is split again if members were lost."""
        _refuse_eager(fn)
        if len(batches) == 1:
            return self._run_batch(fn, batches[0], arguments)
        # One step per call: a lost member breaks one step and not all.
        results = [self._run_batch(fn, batch, None) for batch in batches]
        return jax.tree.map(_with_steps, *results, is_leaf=is_per_replica)

    def _run_batch(
        self, fn: Callable[..., Any], batch: HostBatch, arguments: Arguments | None
    ) -> Any:
        def placed() -> Arguments:
            topology = self._strategy.topology
            if arguments is not None and _is_split_for(arguments, topology):
                return arguments
            return batch_arguments(placed_batches([split_again(batch, topology)], topology))

        return self._run_until_committed(fn, placed)

    def _run_until_committed(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Arguments]
    ) -> Any:
        """Runs a step until it counts; `arguments_of` returns its arguments for present members."""
        group: Any = current_group()
        while True:
            topology = self._strategy.topology
            arguments = arguments_of()
            program = self.program(fn, arguments)
            if topology is not self._strategy.topology:
                continue  # a member was lost while initial values were exchanged
            try:
                result = program.run(arguments)
            except RoundAbortedError:
                group.welcome()  # processes that take the places of lost ones begin with this step
                continue
            key = self._keys.key(fn)
            if program.is_worth_preparing(has_siblings=key in self._prepared):
                self._prepared.add(key)
                self._prepare_smaller(fn, arguments_of)
            if (size := group.admissions.wanted_size) is not None:
                self._prepare_larger(fn, arguments_of, size)
            return result

    def _prepare_smaller(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Arguments]
    ) -> ElasticProgram:
        """Compiles a step for one member less, in a thread, before one is lost."""
        own = jax.process_index()
        devices = list(self._strategy.topology.devices or ())
        devices.remove(next(one for one in reversed(devices) if one.process_index != own))
        return self._prepare(fn, arguments_of, Topology(tuple(devices)))

    def _prepare_larger(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Arguments], size: int
    ) -> None:
        """Compiles a step for a process that waits to join, and says when that is done."""
        key = self._keys.key(fn), size
        if key not in self._larger:
            members = self._strategy.topology.devices or ()
            others = [one for one in jax.devices() if one not in members]
            topology = Topology((*members, *others[:1]))
            self._larger[key] = self._prepare(fn, arguments_of, topology)
        if self._larger[key].is_compiled:
            group: Any = current_group()
            group.admissions.prepared_for = size

    def _prepare(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Arguments], topology: Topology
    ) -> ElasticProgram:
        """Compiles a step for other members, in a thread; returns its program."""
        with setting(expected, topology):
            return self._started(fn, arguments_of())

    def _started(self, fn: Callable[..., Any], arguments: Arguments) -> ElasticProgram:
        program = self.program(fn, arguments)
        program.prepare(arguments)
        return program

    def compile_ahead(self, fn: Callable[..., Any], batch: HostBatch) -> None:
        """Compiles a step for batches such as this one, before this process joins the others."""

        def placed() -> Arguments:
            topology = self._strategy.topology
            return batch_arguments(placed_batches([split_again(batch, topology)], topology))

        self._compile(fn, placed)

    def compile_call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Compiles a function for arguments of `run`, before this process joins the others."""
        self._compile(fn, lambda: self._flattened(args, kwargs))

    def _compile(self, fn: Callable[..., Any], arguments_of: Callable[[], Arguments]) -> None:
        """Compiles a step for the expected members, and for one less: the others have both.

        Runs the former once without the others, since a first run takes longer.
        """
        programs = [self._started(fn, arguments_of())]
        if self._strategy.topology.num_replicas > 1:
            programs.append(self._prepare_smaller(fn, arguments_of))
        for program in programs:
            program.wait_until_compiled()
        group: Any = current_group()
        arguments = arguments_of()
        with group.rehearsal(), contextlib.suppress(RoundAbortedError):
            self.program(fn, arguments).run(arguments)

    def program(self, fn: Callable[..., Any], arguments: Arguments) -> ElasticProgram:
        """Returns the program for the present number of members; see `Lockstep.program`."""
        topology = self._strategy.topology
        if topology is not self._topology:
            self._by_size[self._topology.num_replicas] = self._programs
            programs = self._by_size.pop(topology.num_replicas, OrderedDict())
            self._programs = OrderedDict((key, one.on(topology)) for key, one in programs.items())
            self._topology = topology
        program = super().program(fn, arguments)
        assert isinstance(program, ElasticProgram)
        return program

    def _note_compilation(
        self, fn: Callable[..., Any], arguments: Arguments, program: Program
    ) -> None:
        """Notes the programs of the first members; those of fewer have another reason."""
        if self._topology.num_replicas == self._noted_size:
            super()._note_compilation(fn, arguments, program)

    def _program_of(self, trace: Trace, name: str) -> Program:
        self.outside_variables.note([*trace.written, *trace.read_only], name)
        group: Any = current_group()
        make = functools.partial(ElasticProgram, topology=self._topology, name=name, group=group)
        program = make(trace)
        if trace.summaries is not None:
            program.make_plain = functools.cache(lambda: make(trace.without_summaries()))
        return program


def _refuse_eager(fn: Callable[..., Any]) -> None:
    if config.runs_eagerly():
        raise NotImplementedError(
            explain(
                f"{name_of(fn)} of an ElasticStrategy was called op by op.",
                expected="a compiled step, which can run again if a member is lost.",
                fix="leave out run_eagerly, or debug with MirroredStrategy.",
            )
        )


def is_on(value: PerReplica, topology: Topology) -> bool:
    """Returns True if a value has a part for each of the present members, and no other."""
    stacked = value.stacked
    return not isinstance(stacked, jax.Array) or (
        stacked.sharding.device_set == set(topology.devices or ())
    )


def _is_split_for(arguments: Arguments, topology: Topology) -> bool:
    return all(
        not isinstance(array, jax.Array) or array.sharding.device_set == set(topology.devices or ())
        for array in arguments.split
    )


def _on(topology: Topology, leaf: Any) -> Any:
    """Returns a value of this process's replica among the present members."""
    if not isinstance(leaf, PerReplica) or leaf.stacked is None:
        return leaf
    if is_on(leaf, topology):
        return leaf
    if leaf.split_again is not None:
        return leaf.split_again()
    own = leaf.stacked.addressable_data(0)
    if topology.num_replicas == 1:
        return own[0]
    return PerReplica(stacked=topology.put_stacked(own))


def _with_steps(*leaves: Any) -> Any:
    """Stacks the results of steps, over the members of the last one."""
    if not isinstance(leaves[0], PerReplica | jax.Array):
        return leaves[0]
    own = [
        leaf.stacked.addressable_data(0)[0] if isinstance(leaf, PerReplica) else leaf
        for leaf in leaves
    ]
    last = leaves[-1]
    if not isinstance(last, PerReplica):
        return jnp.stack(own)
    shape = (last.stacked.shape[0], len(own), *own[-1].shape)
    stacked = jax.make_array_from_single_device_arrays(
        shape, last.stacked.sharding, [jnp.stack(own)[None]]
    )
    return PerReplica(stacked=stacked, lengths=last.lengths)


# Collectives of a traced replica function as operations of a round of the group.

_Combination = Callable[[Any, list[Any]], Sequence[Any]]


def member_rules(rounds: Rounds, rank: jax.Array, num_members: int) -> Mapping[str, Rule]:
    """Returns the rules for the collectives of one member; `rank` is its place among all."""
    member = _MemberCollectives(rounds, rank, num_members)
    operations: dict[str, _Combination] = {
        "psum": functools.partial(member.combine, RoundOperation.SUM),
        "psum_invariant": functools.partial(member.combine, RoundOperation.SUM),
        "pmax": functools.partial(member.combine, RoundOperation.MAX),
        "pmin": functools.partial(member.combine, RoundOperation.MIN),
        "all_gather": member.gather,
        "all_gather_invariant": member.gather,
        "reduce_scatter": member.reduce_scatter,
        "all_to_all": member.all_to_all,
        "ppermute": member.permute,
    }
    rules: dict[str, Rule] = {name: _outside(one) for name, one in operations.items()}
    rules["axis_index"] = lambda eqn, inputs, is_inside: [rank]
    return rules


def _outside(operation: _Combination) -> Rule:
    def rule(eqn: JaxprEqn, inputs: list[Any], is_inside: bool) -> Sequence[Any]:
        if is_inside or eqn.params.get("axis_index_groups") is not None:
            where = "in a branch or a loop" if is_inside else "over groups of replicas"
            raise NotImplementedError(
                explain(
                    f"A step of an ElasticStrategy calls {eqn.primitive.name} {where}.",
                    expected="collectives over all replicas, outside of lax.cond, lax.scan and "
                    "lax.while_loop: members combine values in one order.",
                    fix="combine the values after the loop, or use MultiWorkerMirroredStrategy.",
                )
            )
        _check_axes(eqn)
        return operation(eqn, inputs)

    return rule


def _check_axes(eqn: JaxprEqn) -> None:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = axes if isinstance(axes, tuple | list) else (axes,)
    if tuple(names) != (REPLICA_AXIS,):
        raise NotImplementedError(
            explain(
                f"A step of an ElasticStrategy calls {eqn.primitive.name} over {names}.",
                expected=f"the axis {REPLICA_AXIS!r} alone.",
                fix="use one axis for each collective.",
            )
        )


class _MemberCollectives:
    """The collectives of one member."""

    def __init__(self, rounds: Rounds, rank: jax.Array, num_members: int) -> None:
        self._rounds, self._rank, self._num_members = rounds, rank, num_members

    def combine(self, operation: RoundOperation, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        del eqn
        return [self._rounds.combine(operation, jnp.asarray(one)) for one in inputs]

    def gather(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        axis, is_tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]
        results: list[Any] = []
        for one in inputs:
            rows = jnp.moveaxis(self._rounds.gather(one, self._num_members), 0, axis)
            if is_tiled:  # axes (members, size) at the place of one
                shape = (*one.shape[:axis], -1, *one.shape[axis + 1 :])
                rows = rows.reshape(shape)
            results.append(rows)
        return results

    def reduce_scatter(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        axis, is_tiled = eqn.params["scatter_dimension"], eqn.params["tiled"]
        [total] = self.combine(RoundOperation.SUM, eqn, inputs)
        size = total.shape[axis] // self._num_members
        own = jax.lax.dynamic_slice_in_dim(total, self._rank * size, size, axis)
        return [own if is_tiled else jnp.squeeze(own, axis)]

    def all_to_all(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        split, joined = eqn.params["split_axis"], eqn.params["concat_axis"]
        [array] = inputs
        count = self._num_members
        shape = (*array.shape[:split], count, -1, *array.shape[split + 1 :])
        received = self._rounds.all_to_all(jnp.moveaxis(array.reshape(shape), split, 0))
        return [jnp.concatenate([received[place] for place in range(count)], joined)]

    def permute(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        sources = [self._num_members] * self._num_members  # a row of zeros
        for source, target in eqn.params["perm"]:
            sources[target] = source
        results: list[Any] = []
        for one in inputs:
            rows = self._rounds.gather(one, self._num_members)
            rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
            results.append(rows[jnp.asarray(sources)[self._rank]])
        return results


# Components of ON_READ variables in an elastic group: each member keeps those of all.


def is_component(place: Destination) -> bool:
    """Returns True for an ON_READ variable, and False for a carry of `run_steps`."""
    return bool(place.spec) and hasattr(place.variable, "whole")


def components_of_all(own: Sequence[Any], rounds: Rounds, count: int) -> list[jax.Array]:
    """Returns the components of all `count` members, who keep what one loses. Call in a step."""
    gathered: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(value.dtype for value in own):  # few messages
        places = [place for place, value in enumerate(own) if value.dtype == dtype]
        rows = rounds.gather(jnp.concatenate([own[place].ravel() for place in places]), count)
        ends = np.cumsum([own[place].size for place in places])[:-1]
        for place, part in zip(places, jnp.split(rows, ends, axis=1), strict=True):
            gathered[place] = part.reshape((count, *own[place].shape[1:]))
    return [gathered[place] for place in range(len(own))]


def held_components(variables: Sequence[Any]) -> list[Any]:
    """Returns the components of all members as of the last step, None where others came since."""
    wholes = [(one.whole, one.stored) for one in variables]
    return [whole.gathered if whole.storage is stored else None for whole, stored in wholes]


def hold_components(variables: Sequence[Any], components: Sequence[Any]) -> None:
    """Keeps the components of all members with each variable."""
    for variable, gathered in zip(variables, components, strict=True):
        if gathered is not None:
            variable.whole.hold(variable.stored, gathered)


# Calls of a program after which more are expected.
_MANY = 3


class RoundAbortedError(Exception):
    """A member was lost before all had the values of a step, which no member has committed."""


class MemberStep(ReplicaStep):
    """A step of this process's replica; collectives are operations of a round of the group.

    It depends on the number of members, and on no other property of them.
    """

    may_loop = False

    def __init__(self, trace: Trace, topology: Topology, group: ElasticGroup) -> None:
        super().__init__(trace, topology)
        self._group = group

    def compiled(self, *, many: bool) -> Any:
        """Returns the jitted function of this process's rank, and of its arrays of each pool."""
        assert not many
        return jax.jit(self._of_member, donate_argnums=1)

    def _of_member(
        self, rank: jax.Array, *arrays: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any], jax.Array]:
        """Returns new values, components of all, results, and True if they are committed."""
        rounds, count = Rounds(), self.topology.num_replicas
        pools = dict(zip(POOLS, arrays, strict=True))
        outputs = retrace(
            fast_on_cpu(self.trace.jaxpr, self.topology),
            [pools[source][index] for source, index in self.trace.inputs],
            rules=member_rules(rounds, rank, count),
        )
        own = [
            value for value, place in zip(outputs, self.written.places, strict=False) if place.spec
        ]
        components = components_of_all(own, rounds, count)
        is_committed = rounds.commit()
        written = pools["written"]
        values = [
            jnp.where(is_committed, new, old) for new, old in zip(outputs, written, strict=False)
        ]
        return values, components, outputs[len(written) :], is_committed

    @property
    def component_variables(self) -> list[Any]:
        """Written variables of which each member keeps the components of all."""
        return [place.variable for place in self.written.places if is_component(place)]

    def finish(self, handed: list[Any], shared: list[Any]) -> None:
        """Keeps the components of all; raises RoundAbortedError if the round was not committed."""
        components, was_committed = handed
        hold_components(self.component_variables, components)
        self._group.tell()
        if not was_committed:
            raise RoundAbortedError


class ElasticProgram(Program):
    """A program of a member, whose calls are rounds of the group."""

    def __init__(self, trace: Trace, topology: Topology, name: str, group: ElasticGroup) -> None:
        self._group = group
        self._num_calls = 0
        self._compiled: concurrent.futures.Future[Any] | None = None
        self._of_member = MemberStep(trace, topology, group)
        super().__init__(self._of_member, name)

    def on(self, topology: Topology) -> Self:
        """Returns this program for other members, of the same number."""
        moved = copy.copy(self)
        moved._topology = topology  # the compiled function does not depend on it
        moved._constants = None
        if (plain := self.make_plain) is not None:
            moved.make_plain = functools.cache(lambda: cast("Self", plain()).on(topology))
        return moved

    def is_worth_preparing(self, *, has_siblings: bool) -> bool:
        """Returns True once, if one member less can be expected to run it.

        One with siblings is of a function that many calls have proved, for other shapes.
        """
        self._num_calls += 1
        return self._num_calls == (1 if has_siblings else _MANY) and self._topology.num_replicas > 1

    @property
    def is_compiled(self) -> bool:
        """True if a call would not compile it."""
        return bool(self._called) or (self._compiled is not None and self._compiled.done())

    @functools.cached_property
    def _round_name(self) -> str:
        # Members that joined later have traced the step by themselves: all rounds compare it.
        return f"{self._name} {operations_digest(self.trace.jaxpr)}"

    def wait_until_compiled(self) -> None:
        """Waits for the thread of `prepare`."""
        if self._compiled is not None:
            self._compiled.result()

    def prepare(self, arguments: Arguments) -> None:
        """Compiles it in a thread; the first call waits for that."""
        if self._compiled is None and not self._called:
            shapes = self._shapes_here(arguments)
            self._compiled = _compiler().submit(lambda: self._single.lower(*shapes).compile())

    def _shapes_here(self, arguments: Arguments) -> list[Any]:
        """Returns the arguments of the compiled function as shapes."""
        several = self._topology.num_replicas > 1
        written, read_only, _ = self._lasting_inputs()
        leaves = [leaf for leaf in arguments.leaves if leaf.shape is not None]
        split = [
            jax.ShapeDtypeStruct((1, *leaf.shape[1:]) if several else leaf.shape, leaf.dtype)
            for leaf in leaves
            if leaf.split and leaf.shape is not None
        ]
        pools: list[list[Any]] = [list(map(_local, pool)) for pool in (written, read_only)]
        pools += [split, list(map(_local, arguments.shared)), self.trace.constants]
        return [jnp.int32(0), *jax.tree.map(_shape_of, pools), []]

    def _everywhere(self, value: object) -> Any:
        return value  # a round takes values of this process

    def _start(self, function: Callable[..., Any], inputs: tuple[list[Any], ...]) -> Any:
        before = held_components(self._of_member.component_variables)
        if self._compiled is not None and function is self._single:
            self._single = function = self._compiled.result()
            self._compiled = None
        self._called.add(function)
        self._group.begin_round(self._round_name)
        own = [list(map(_local, pool)) for pool in inputs]
        try:
            values, components, results, is_committed = function(
                jnp.int32(self._group.process_id), *own
            )
            was_committed = bool(is_committed)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter of small programs
            found = error_of_rounds()
            if isinstance(found, DivergedError):
                raise _diverged(self._group.identity.label, self._name, found) from error
            raise found or error from error
        places = self._of_member.written.places
        values = [
            self._on_all(value, self._sharding_of(place.spec))
            for value, place in zip(values, places, strict=True)
        ]
        stacked = self._sharding_of(PartitionSpec("replica"))
        results = [self._on_all(result, stacked) for result in results]
        return values, results, [components if was_committed else before, was_committed]

    def _sharding_of(self, spec: PartitionSpec) -> Sharding:
        return self._topology.stacked if spec else self._topology.replicated

    def _on_all(self, value: jax.Array, sharding: Sharding) -> jax.Array:
        """Returns a local value as this process's part of an array over all members."""
        topology = self._topology
        if topology.num_replicas == 1:
            return value
        shape = value.shape
        if sharding is topology.stacked:
            shape = (topology.num_replicas, *shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, [value])


def _diverged(label: str, name: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{label} called {name}, but {error}.",
            expected="the same calls and programs on all processes.",
            fix="compare the functions and their arguments: find a condition on the process, "
            "another batch size, or an option set on one process only.",
            code="SG402",
        )
    )


@functools.cache
def _compiler() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, "stratagem compiler")


def _shape_of(value: Any) -> jax.ShapeDtypeStruct:
    value = value if isinstance(value, jax.ShapeDtypeStruct) else jnp.asarray(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=_is_weak(value))


def _is_weak(value: Any) -> bool:
    return bool(getattr(value, "weak_type", False))


def _local(value: Any) -> Any:
    return value.addressable_data(0) if isinstance(value, jax.Array) else value

"""Program of a member of an elastic group: its new values count only if all members have them."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import PartitionSpec, Sharding

from stratagem.devices.collectives.elastic_rounds import FollowedRounds, Rounds, error_of_rounds
from stratagem.devices.mesh import Topology
from stratagem.execution.analysis.replication import (
    differing_outputs,
)
from stratagem.execution.jaxprs import contains_primitive, inner_jaxprs, retrace
from stratagem.execution.programs.convolutions import fast_on_cpu
from stratagem.execution.programs.member_rules import member_rules
from stratagem.execution.programs.program import POOLS, Program
from stratagem.execution.programs.variable_values import Destination
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.lost_changes import operations_digest
from stratagem.group.elastic.backed_rounds import scale_of_sums
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import DivergedError
from stratagem.group.elastic.views import diverged
from stratagem.variables.distributed import Participation, PerReplica
from stratagem.variables.registry import VariableKind, home_of

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


def merged_components(
    new: Sequence[Any], before: Sequence[Any], replicas: Sequence[int]
) -> list[Any]:
    """Returns the components of all: new ones of the participants, old ones of the others."""
    merged: list[Any] = []
    for one, old in zip(new, before, strict=True):
        rows = np.array(old)
        rows[list(replicas)] = np.asarray(one)[list(replicas)]
        merged.append(jnp.asarray(rows))
    return merged


# Steps that may leave replicas out, which then apply the results of the others.
#
# Such a step trains: its rows change variables by sums over replicas alone, and every row counts
# only
# for one step. If rows count for themselves, as in a prediction, or replicas exchange them, all
# replicas must take part.

_SUMS = ("psum", "psum_invariant", "pmax", "pmin")
_EXCHANGES = (
    "all_gather",
    "all_gather_invariant",
    "reduce_scatter",
    "all_to_all",
    "ppermute",
)
_CALLBACKS = ("io_callback", "debug_callback", "debug_print")


def own_outputs(trace: Trace) -> list[bool]:
    """Returns, for each output of a step, True if it may differ between replicas."""
    flags = differing_outputs(trace.jaxpr.jaxpr, trace.differing_inputs)
    return [
        differs or (place < len(trace.written) and _is_own(trace.written[place]))
        for place, differs in enumerate(flags)
    ]


def reason_to_wait(trace: Trace) -> str | None:
    """Returns why all replicas must take part in a step; None if some may be left out."""
    jaxpr = trace.jaxpr.jaxpr
    mirrored = [not _is_own(variable) for variable in trace.written]
    trains = [getattr(variable, "trainable", False) for variable in trace.written]
    components = [_is_component(trace, *one) for one in trace.inputs]
    has_outside = bool(trace.summaries or trace.lookups or trace.sent or trace.late)
    reasons = {
        "it trains no variable": not any(map(all, zip(mirrored, trains, strict=True))),
        "it sums nothing over replicas": not contains_primitive(jaxpr, *_SUMS),
        "replicas exchange rows in it": contains_primitive(jaxpr, *_EXCHANGES),
        "it calls functions of the host": contains_primitive(jaxpr, *_CALLBACKS),
        "it records summaries, or uses variables outside of this process": has_outside,
        "it reads what each replica has counted": _combines(jaxpr, components),
        "it gives a variable of all replicas a value that one of them has computed": any(
            differs and is_mirrored
            for differs, is_mirrored in zip(own_outputs(trace), mirrored, strict=False)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_own(variable: object) -> bool:
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


def _is_component(trace: Trace, source: str, place: int) -> bool:
    """Returns True for the component of a variable that each replica has for itself."""
    variables = {"written": trace.written, "read_only": trace.read_only}.get(source, ())
    return bool(variables) and _is_own(variables[place])


def _combines(jaxpr: Jaxpr, flags: list[bool]) -> bool:
    """Returns True if a collective may have a flagged input among its arguments."""
    flagged = dict(zip(jaxpr.invars, flags, strict=True))

    def read(atom: Var | Literal) -> bool:
        return not isinstance(atom, Literal) and flagged.get(atom, False)

    for eqn in jaxpr.eqns:
        if not any(map(read, eqn.invars)):
            continue
        inner = inner_jaxprs(eqn)
        if eqn.primitive.name in _SUMS or any(contains_primitive(one, *_SUMS) for one in inner):
            return True
        flagged.update((atom, True) for atom in eqn.outvars)
    return False


# Update of variables from values that members have combined, as a program of its own.
#
# Members that take part in a round and those that are left out run different programs, in which a
# compiler rounds the same formula in different ways. The program of the update is the same for all.


@dataclasses.dataclass(frozen=True)
class Update:
    """Update of variables from the inputs of a step and from what its rounds combine.

    `places` are those of its results among those of the step. `inputs` has a place for each of its
    arguments: among the flat inputs of the step, or, from their number on, among combined values.
    """

    places: tuple[int, ...]
    inputs: tuple[int, ...]
    program: Callable[[list[Any], list[Any]], list[Any]]

    def run(self, inputs: Sequence[Any], combined: Sequence[Any]) -> dict[int, Any]:
        """Returns new values by place; the old values at these places are donated."""
        given = [*inputs, *combined]
        old = [given[place] for place in self.inputs if place in self.places]
        others = [given[place] for place in self.inputs if place not in self.places]
        return dict(zip(self.places, self.program(old, others), strict=True))


def update_apart(
    step: Callable[..., Any],
    arguments: Sequence[Any],
    is_updated: Sequence[bool],
    primitive: str,
) -> tuple[Any, list[Any], Update]:
    """Calls a function in a trace, without its update.

    Args:
        step: returns a pytree, new values of variables first.
        arguments: its arguments, of which the first is the list of these variables' old values.
        is_updated: for each new value, True if it is part of the update. Then it must depend on
            the arguments and on combined values alone.
        primitive: what combines values of several members.

    Returns:
        The results of `step`, with None for each value that is updated; the combined values; and
        the update.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    jaxpr = closed.jaxpr
    eqns = _leading_to(
        jaxpr,
        [atom for atom, flag in zip(jaxpr.outvars, is_updated, strict=False) if flag],
        ends_at=primitive,
    )
    made = {atom for eqn in eqns for atom in eqn.outvars}
    places = [place for place, flag in enumerate(is_updated) if flag and _is_in(jaxpr, place, made)]
    given = _inputs(eqns)
    own = [atom for atom in given if atom not in jaxpr.invars]
    flat = {atom: place for place, atom in enumerate(jaxpr.invars)}
    flat |= {atom: len(jaxpr.invars) + place for place, atom in enumerate(own)}
    given.sort(key=lambda atom: flat[atom] not in places)  # stable: those to donate come first
    results: list[Any] = [jaxpr.outvars[place] for place in places]
    update = jaxpr.replace(constvars=[], invars=given, eqns=eqns, outvars=results)
    others = [atom for place, atom in enumerate(jaxpr.outvars) if place not in places]
    before = _needed(jaxpr.replace(outvars=[*others, *own]))
    values = jaxpr_as_fun(ClosedJaxpr(before, closed.consts))(*jax.tree.leaves(tuple(arguments)))
    rest = iter(values)
    leaves = [None if place in places else next(rest) for place in range(len(jaxpr.outvars))]
    whole = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    inputs = tuple(flat[atom] for atom in given)
    return whole, list(rest), Update(tuple(places), inputs, _program(update))


_programs: dict[str, Any] = {}


def _program(jaxpr: Jaxpr) -> Any:
    """Returns the compiled update, which is the same for any number of members."""
    key = str(jaxpr)
    if key not in _programs:
        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
        _programs[key] = jax.jit(
            lambda old, others: list(function(*old, *others)), donate_argnums=0
        )
    return _programs[key]


def _is_in(jaxpr: Jaxpr, place: int, atoms: set[Var]) -> bool:
    atom = jaxpr.outvars[place]
    return isinstance(atom, Var) and atom in atoms


def _leading_to(jaxpr: Jaxpr, atoms: Sequence[Any], ends_at: str = "") -> list[JaxprEqn]:
    """Returns the equations that compute variables, in their order, from results of a primitive."""
    wanted = {atom for atom in atoms if isinstance(atom, Var)}
    found: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(eqn.outvars) and eqn.primitive.name != ends_at:
            wanted.update(_read(eqn))
            found.append(eqn)
    return found[::-1]


def _needed(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr with the equations that its outputs need."""
    return jaxpr.replace(eqns=_leading_to(jaxpr, jaxpr.outvars))


def _inputs(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Returns the variables that equations take from elsewhere, in their order."""
    made = {atom for eqn in eqns for atom in eqn.outvars}
    read = dict.fromkeys(atom for eqn in eqns for atom in _read(eqn))
    return [atom for atom in read if atom not in made]


def _read(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


_logger = logging.getLogger(__name__)

# Calls of a program after which more are expected.
_MANY = 3


class RoundAbortedError(Exception):
    """A member was lost before all had the values of a step, which no member has committed."""


class ElasticProgram(Program):
    """A program of this process's replica; collectives are operations of a round of the group.

    It depends on the number of members, and on no other property of them.
    """

    _may_loop = False

    def __init__(self, trace: Trace, topology: Topology, name: str, group: ElasticGroup) -> None:
        self._group = group
        self._num_calls = 0
        self._compiled: concurrent.futures.Future[Any] | None = None
        self._following: concurrent.futures.Future[Any] | None = None
        self._may_leave_out = self._is_backed = False
        self.has_followed = False  # True if the last step ran without this member's rows
        self._lengths: Sequence[int] | None = None
        self._participation: Participation | None = None
        self._own = own_outputs(trace) if group.num_backups else []
        super().__init__(trace, topology, name)
        self._updates: list[Update] = []  # one per trace, all alike; shared with `on`
        self._may_leave_out = self._is_worth_backing()
        if self._may_leave_out:  # the update donates old values
            self._step = jax.jit(self._step_of_member)

    def _is_worth_backing(self) -> bool:
        """Returns True if members that are late may be left out; logs why not."""
        if not self._group.num_backups or self._topology.num_replicas == 1:
            return False
        reason = reason_to_wait(self.trace)
        if any(place.spec and not is_component(place) for place in self._written.places):
            reason = "it carries values of single replicas"
        if reason is not None:
            _logger.info("Steps of %s wait for all workers: %s.", self._name, reason)
        return reason is None

    def run_with(self, arguments: Arguments, *, returns_parts: bool) -> Any:
        """Runs one step. Members that are late are left out if that is possible.

        `returns_parts` is True if the caller can take results that only participants have.
        """
        self.has_followed = False
        lengths = self._lengths = arguments.batch.lengths
        has_parts = any(self._own[len(self.trace.written) :])
        self._is_backed = (
            self._may_leave_out
            and (returns_parts or not has_parts)
            and (lengths is None or all(lengths))
        )
        try:
            return self.run(arguments)
        finally:
            self._is_backed = False

    def on(self, topology: Topology) -> Self:
        """Returns this program for other members, of the same number."""
        moved = copy.copy(self)
        moved._topology = topology  # the compiled function does not depend on it
        moved._constants = None
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

    def prepare_following(self, arguments: Arguments) -> None:
        """Compiles, in a thread, the step of a member that is left out."""
        if self._may_leave_out and self._following is None:
            shapes = self._shapes_here(arguments)
            follow = jax.jit(functools.partial(self._step_of_member, follows=True))
            self._following = _compiler().submit(lambda: follow.lower(*shapes).compile())

    def prepare(self, arguments: Arguments) -> None:
        """Compiles it in a thread; the first call waits for that."""
        if self._compiled is None and not self._called:
            shapes = self._shapes_here(arguments)
            self._compiled = _compiler().submit(lambda: self._step.lower(*shapes).compile())

    def _shapes_here(self, arguments: Arguments) -> list[Any]:
        """Returns the arguments of the compiled function as shapes."""
        several = self._topology.num_replicas > 1
        written, read_only = self._written.read(self._value), self._read_only.read(self._value)
        leaves = [leaf for leaf in arguments.leaves if leaf.shape is not None]
        split = [
            jax.ShapeDtypeStruct((1, *leaf.shape[1:]) if several else leaf.shape, leaf.dtype)
            for leaf in leaves
            if leaf.split and leaf.shape is not None
        ]
        pools: list[list[Any]] = [list(map(_local, pool)) for pool in (written, read_only)]
        pools += [split, list(map(_local, arguments.shared)), self.trace.constants]
        return [jnp.int32(0), *jax.tree.map(_shape_of, pools), []]

    def _compile(self, *, many: bool) -> Any:
        assert not many
        return jax.jit(self._step_of_member, donate_argnums=1)

    def _step_of_member(
        self, rank: jax.Array, *arrays: list[Any], follows: bool = False
    ) -> tuple[list[Any], list[Any], list[Any], jax.Array, list[Any]]:
        """Returns new values, components of all, results, and True if they are committed.

        If members may be left out, values of an update are None, and the last result has what it
        needs from the round. `follows` is for a member that is left out: then nothing is computed
        from its rows.
        """
        written = arrays[0]
        rounds, count = FollowedRounds() if follows else Rounds(), self._topology.num_replicas
        rules = member_rules(rounds, rank, count)

        def evaluate(inputs: list[Any]) -> list[Any]:
            jaxpr = fast_on_cpu(self.trace.jaxpr, self._topology)
            return retrace(jaxpr, inputs, rules=rules)

        def compute(*arrays: list[Any]) -> tuple[list[Any], list[Any], jax.Array]:
            outputs = self._outputs(evaluate, *arrays)
            components = components_of_all(self._components_in(outputs), rounds, count)
            is_committed, takes_part = rounds.commit()
            return outputs, [takes_part, *components], is_committed

        combined: list[Any] = []
        if self._may_leave_out:
            is_updated = [not place.spec for place in self._written.places]
            computed, combined, update = update_apart(compute, arrays, is_updated, "ffi_call")
            self._updates[:] = [update]
        else:
            computed = compute(*arrays)
        outputs, [takes_part, *components], is_committed = computed
        if follows:
            takes_part = False
        elif not self._may_leave_out:
            takes_part = is_committed
        values = [
            None if new is None else jnp.where(takes_part if place.spec else is_committed, new, old)
            for new, old, place in zip(outputs, written, self._written.places, strict=False)
        ]
        results = outputs[len(written) :]
        if self._may_leave_out:
            own = self._own[len(written) :]
            results = [
                jnp.where(takes_part, one, jnp.zeros((), one.dtype)) if is_own else one
                for one, is_own in zip(results, own, strict=True)
            ]
        return values, components, results, is_committed, combined

    def _components_in(self, outputs: list[Any]) -> list[Any]:
        places = self._written.places
        return [value for value, place in zip(outputs, places, strict=False) if place.spec]

    def _outputs(self, evaluate: Callable[[list[Any]], list[Any]], *arrays: list[Any]) -> list[Any]:
        pools = dict(zip(POOLS, arrays, strict=True))
        return evaluate([pools[source][index] for source, index in self.trace.inputs])

    def _call(
        self,
        function: Callable[..., Any],
        split: list[Any],
        shared: list[Any],
        rows: Sequence[Any] = (),
    ) -> list[Any]:
        written, read_only, constants = self._lasting_inputs()
        summaries = self._summaries
        before = held_components(self._component_variables)
        # Components of one that is left out stay those that are held.
        is_backed = self._is_backed and all(one is not None for one in before)
        function = self._followed(function) if is_backed else function
        inputs = [
            list(map(_local, pool)) for pool in (written, read_only, split, shared, constants)
        ]
        if self._compiled is not None and function is self._step:
            self._step = function = self._compiled.result()
            self._compiled = None
        self._called.add(function)
        self._group.begin_round(self._round_name, is_backed=is_backed, lengths=self._lengths)
        try:
            values, components, results, is_committed, combined = function(
                jnp.int32(self._group.process_id), *inputs, list(rows)
            )
            was_committed = bool(is_committed)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter of small programs
            found = error_of_rounds()
            if isinstance(found, DivergedError):
                raise diverged(self._group.identity.label, self._name, found) from error
            raise found or error from error
        values = self._updated(values, [*inputs, list(rows)], combined, was_committed=was_committed)
        self._written.replace(
            [
                self._on_all(value, self._sharding_of(place.spec))
                for value, place in zip(values, self._written.places, strict=True)
            ]
        )
        hold_components(
            self._component_variables,
            self._of_all(components, before) if was_committed else before,
        )
        stacked = self._sharding_of(PartitionSpec("replica"))
        results = [self._on_all(result, stacked) for result in results]
        self._group.tell()
        if not was_committed:
            raise RoundAbortedError
        return results if summaries is None else summaries.end(results, None)

    def _updated(
        self, values: list[Any], inputs: list[Any], combined: list[Any], *, was_committed: bool
    ) -> list[Any]:
        """Returns the values of variables after a step, with those of its update."""
        if not self._may_leave_out:
            return values
        [update] = self._updates
        flat = jax.tree.leaves(inputs)
        new = update.run(flat, combined) if was_committed else dict(enumerate(inputs[0]))
        return [new[place] if value is None else value for place, value in enumerate(values)]

    def _followed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of one that is left out, if the others have begun without it."""
        self.has_followed = self._group.is_late() and _is_done(self._following)
        if not self.has_followed or self._following is None:
            return function
        return self._following.result()

    def _of_all(self, components: list[Any], before: list[Any]) -> list[Any]:
        """Returns the components of all members after a step that some were left out of."""
        participation = self._participation = self._participation_now()
        if participation is None:  # all have taken part
            return components
        return merged_components(components, before, participation.replicas)

    def _participation_now(self) -> Participation | None:
        """Returns who has taken part in the last step; None if all have."""
        if not self._is_backed:
            return None
        ranks = tuple(map(self._members.index, self._group.participants))
        count = self._topology.num_replicas
        if len(ranks) == count:
            return None
        scale = scale_of_sums(self._lengths, ranks, count)
        return Participation(ranks, scale, self._group.has_taken_part)

    def _assemble(self, outputs: list[Any]) -> Any:
        result = super()._assemble(outputs)
        if self._participation is None:
            return result
        own = self._own[len(self.trace.written) :]
        leaves, structure = jax.tree.flatten(result, is_leaf=_is_per_replica)
        for place, (is_output, output) in enumerate(self.trace.results):
            if is_output and own[output]:
                leaves[place] = dataclasses.replace(
                    leaves[place], participation=self._participation
                )
        return jax.tree.unflatten(structure, leaves)

    @property
    def _component_variables(self) -> list[Any]:
        return [place.variable for place in self._written.places if is_component(place)]

    @property
    def _members(self) -> tuple[int, ...]:
        return tuple(device.process_index for device in self._topology.devices or ())

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


def _is_done(
    future: concurrent.futures.Future[Any] | None,
) -> TypeGuard[concurrent.futures.Future[Any]]:
    return future is not None and future.done()


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


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

"""Program of a member of an elastic group: its new values count only if all members have them."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec, Sharding

from stratagem.devices.collectives.elastic_rounds import RoundOperation, Rounds, error_of_rounds
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.errors import explain
from stratagem.execution.jaxprs import Rule, retrace
from stratagem.execution.programs.convolutions import fast_on_cpu
from stratagem.execution.programs.program import Program
from stratagem.execution.programs.steps import POOLS, Destination, ReplicaStep
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.lost_changes import operations_digest
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import DivergedError

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

"""Executor of an elastic group: a step that a lost member has broken is run again by the others."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem import config
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.programs.elastic_program import ElasticProgram, RoundAbortedError
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.execution.programs.program import Program
from stratagem.execution.tracing.arguments import Arguments, batch_arguments, flatten_arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.lost_changes import name_of
from stratagem.group.current import current_group
from stratagem.input.batches import HostBatch, split_again
from stratagem.input.placement import place
from stratagem.variables.distributed import PerReplica
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
                raise ValueError(
                    explain(
                        f"{name} uses variable {variable.path!r}, which was made outside of the "
                        "strategy's scope. This process joined the others, and did not receive "
                        "its value.",
                        expected="a variable of the strategy, or of a step that was compiled "
                        "before joining.",
                        fix="make it in strategy.scope(); an optimizer has variables as well. Or "
                        "pass the step to strategy.admit(fn, args).",
                    )
                )
            self._references.append(weakref.ref(variable))


class ElasticLockstep(Lockstep):
    """Runs replica functions on the members that are left. See `Executor`."""

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
        """Calls a function once per replica, again if a member is lost; see `Executor.run`."""
        _refuse_eager(fn)
        return self._run_until_committed(fn, lambda: self._flattened(args, kwargs))

    def _flattened(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        topology = self._strategy.topology
        own_args, own_kwargs = jax.tree.map(
            functools.partial(_on, topology), (tuple(args), kwargs), is_leaf=_is_per_replica
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
        return jax.tree.map(_with_steps, *results, is_leaf=_is_per_replica)

    def _run_batch(
        self, fn: Callable[..., Any], batch: HostBatch, arguments: Arguments | None
    ) -> Any:
        def placed() -> Arguments:
            topology = self._strategy.topology
            if arguments is not None and _is_split_for(arguments, topology):
                return arguments
            return batch_arguments(place([split_again(batch, topology)], topology))

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
        before, self._strategy.topology = self._strategy.topology, topology
        try:
            return self._started(fn, arguments_of())
        finally:
            self._strategy.topology = before

    def _started(self, fn: Callable[..., Any], arguments: Arguments) -> ElasticProgram:
        program = self.program(fn, arguments)
        program.prepare(arguments)
        return program

    def compile_ahead(self, fn: Callable[..., Any], batch: HostBatch) -> None:
        """Compiles a step for batches such as this one, before this process joins the others."""

        def placed() -> Arguments:
            topology = self._strategy.topology
            return batch_arguments(place([split_again(batch, topology)], topology))

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


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)

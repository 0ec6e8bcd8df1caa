"""Executor of an elastic group: a step that a lost member has broken is run again by the others."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from stratagem.input.batches import HostBatch, take_own_part
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
        self._by_size: dict[int, OrderedDict[Any, Program]] = {}
        self._noted_size = self._topology.num_replicas
        self._larger: dict[tuple[Any, int], list[ElasticProgram]] = {}
        self._prepared = set[Any]()  # functions that were compiled for one member less
        self.keeps_worker_rows = False  # a step has no more rows for a member if others are lost
        given = getattr(strategy, "executor", None)  # each `fit` has an executor of its own
        is_first = not isinstance(given, ElasticLockstep)
        self.outside_variables = OutsideVariables() if is_first else given.outside_variables

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function once per replica, again if a member is lost; see `Executor.run`."""
        _refuse_eager(fn)
        result, _ = self._run_until_committed(
            fn, lambda: [self._flattened(args, kwargs)], returns_parts=True
        )
        return result

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
        """Runs a batch, in several steps if its rows are more than the members take in one."""
        whole = batch if batch.origin is None else batch.origin
        start = 0

        def placed() -> Iterable[Arguments]:
            topology = self._strategy.topology
            is_whole = not start and self._end(whole, 0, topology) == whole.num_examples
            if arguments is not None and is_whole and _is_split_for(arguments, topology):
                return [arguments]
            return self._placed_parts(whole, start, topology)

        while True:
            result, topology = self._run_until_committed(fn, placed)
            start = self._end(whole, start, topology)
            if start >= whole.num_examples:
                return result

    def _placed_parts(
        self, whole: HostBatch, start: int, topology: Topology
    ) -> Iterator[Arguments]:
        """Yields the arguments of the step that begins at a row, and of those after it."""
        while True:
            end = self._end(whole, start, topology)
            yield batch_arguments(
                place([take_own_part(whole.rows(start, end), topology)], topology)
            )
            start = end
            if start >= whole.num_examples:
                return

    def _end(self, whole: HostBatch, start: int, topology: Topology) -> int:
        """Returns the row with which a step ends that begins at another."""
        if not self.keeps_worker_rows:
            return whole.num_examples
        group: Any = current_group()
        rows_each = -(-whole.num_examples // group.num_places)
        return min(whole.num_examples, start + rows_each * topology.num_replicas)

    def _run_until_committed(
        self,
        fn: Callable[..., Any],
        arguments_of: Callable[[], Iterable[Arguments]],
        *,
        returns_parts: bool = False,
    ) -> tuple[Any, Topology]:
        """Runs a step; returns its result and the members that ran it.

        `arguments_of` returns its arguments for the present members, and those of the steps after
        it with the same data. `returns_parts` is True if the caller can take results that only some
        members have.
        """
        group: Any = current_group()
        while True:
            topology = self._strategy.topology
            arguments = next(iter(arguments_of()))
            program = self.program(fn, arguments)
            if topology is not self._strategy.topology:
                continue  # a member was lost while initial values were exchanged
            try:
                if not isinstance(program, ElasticProgram):
                    return program.run(arguments), topology
                result = program.run_with(arguments, returns_parts=returns_parts)
            except RoundAbortedError:
                group.welcome()  # processes that take the places of lost ones begin with this step
                continue
            key = self._keys.key(fn)
            if program.is_worth_preparing(has_siblings=key in self._prepared):
                self._prepared.add(key)
                program.prepare_following(arguments)
                self._prepare_smaller(fn, arguments_of)
            if (size := group.admissions.wanted_size) is not None:
                self._prepare_larger(fn, arguments_of, size)
            return result, topology

    def _prepare_smaller(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Iterable[Arguments]]
    ) -> list[ElasticProgram]:
        """Compiles a step for one member less, in a thread, before one is lost."""
        own = jax.process_index()
        devices = list(self._strategy.topology.devices or ())
        devices.remove(next(one for one in reversed(devices) if one.process_index != own))
        return self._prepare(fn, arguments_of, Topology(tuple(devices)))

    def _prepare_larger(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Iterable[Arguments]], size: int
    ) -> None:
        """Compiles a step for a process that waits to join, and says when that is done."""
        key = self._keys.key(fn), size
        programs = self._larger.get(key)
        if programs is None:
            members = self._strategy.topology.devices or ()
            others = [one for one in jax.devices() if one not in members]
            topology = Topology((*members, *others[:1]))
            programs = self._larger[key] = self._prepare(fn, arguments_of, topology)
        group: Any = current_group()
        if all(program.is_compiled for program in programs):
            group.admissions.prepared_for = size

    def _prepare(
        self,
        fn: Callable[..., Any],
        arguments_of: Callable[[], Iterable[Arguments]],
        topology: Topology,
    ) -> list[ElasticProgram]:
        """Compiles steps for other members, in a thread; returns their programs."""
        before, self._strategy.topology = self._strategy.topology, topology
        try:
            return self._started(fn, arguments_of())
        finally:
            self._strategy.topology = before

    def _started(
        self, fn: Callable[..., Any], arguments: Iterable[Arguments]
    ) -> list[ElasticProgram]:
        programs: list[ElasticProgram] = []
        for one in arguments:
            program = self.program(fn, one)
            if isinstance(program, ElasticProgram):
                program.prepare(one)
                programs.append(program)
        return programs

    def compile_ahead(self, fn: Callable[..., Any], batch: HostBatch) -> None:
        """Compiles a step for batches such as this one, before this process joins the others."""
        whole = batch if batch.origin is None else batch.origin
        self._compile(fn, lambda: self._placed_parts(whole, 0, self._strategy.topology))

    def compile_call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Compiles a function for arguments of `run`, before this process joins the others."""
        self._compile(fn, lambda: [self._flattened(args, kwargs)])

    def _compile(
        self, fn: Callable[..., Any], arguments_of: Callable[[], Iterable[Arguments]]
    ) -> None:
        """Compiles a step for the expected members, and for one less: the others have both.

        Runs the former once without the others, since a first run takes longer.
        """
        programs = self._started(fn, arguments_of())
        if self._strategy.topology.num_replicas > 1:
            programs += self._prepare_smaller(fn, arguments_of)
        for program in programs:
            program.wait_until_compiled()
        group: Any = current_group()
        with group.rehearsal():
            for arguments in arguments_of():
                with contextlib.suppress(RoundAbortedError):
                    self.program(fn, arguments).run(arguments)

    def program(self, fn: Callable[..., Any], arguments: Arguments) -> Program:
        """Returns the program for the present number of members; see `Lockstep.program`."""
        topology = self._strategy.topology
        if topology is not self._topology:
            self._by_size[self._topology.num_replicas] = self._programs
            programs = self._by_size.pop(topology.num_replicas, OrderedDict())
            self._programs = OrderedDict(
                (key, one.on(topology) if isinstance(one, ElasticProgram) else one)
                for key, one in programs.items()
            )
            self._topology = topology
        return super().program(fn, arguments)

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

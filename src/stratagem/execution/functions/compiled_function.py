"""`sg.function`: the public decorator, and its cache of compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from stratagem import config, settings
from stratagem.config import filters_traceback
from stratagem.contexts import (
    FunctionTrace,
    KnownBuilds,
    NeedsInitialization,
    current_function_trace,
    get_strategy,
    has_strategy,
    tracing_function,
)
from stratagem.devices.context_mesh import is_explicit, on_one_device, outside_context_mesh
from stratagem.devices.exact_integers import require_exact_integers
from stratagem.devices.lockstep import run_together
from stratagem.errors import explain
from stratagem.execution.context.replica import get_replica_context
from stratagem.execution.programs.lockstep import note_compilation
from stratagem.execution.programs.recompilations import ArgumentKinds, Recompilations, Usage
from stratagem.execution.summary.collector import CollectedSummaries, Collector
from stratagem.execution.summary.settings import trace_key
from stratagem.execution.summary.writer import begin_recording
from stratagem.execution.tracing.arguments import Static
from stratagem.execution.tracing.errors import created_again
from stratagem.execution.tracing.functionalize import initialize_created_variables
from stratagem.execution.tracing.lost_changes import agree_on_program, call_with_copies, name_of
from stratagem.execution.tracing.tracer import as_values, rebuilt
from stratagem.observe.profiling.recorder import observed_call
from stratagem.variables.distributed import PerReplica
from stratagem.variables.exhausted_memory import ExplainsExhaustedMemory
from stratagem.variables.initial_values import agree_on_initial_values
from stratagem.variables.layouts import stored_sharding
from stratagem.variables.registry import home_of
from stratagem.variables.regrouping import is_array

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from stratagem.execution.tracing.arguments import Shaped

# Traces and compiled programs of `sg.function`, with variables as inputs and outputs.


@dataclasses.dataclass(frozen=True)
class Call:
    """Flattened arguments of one call. `kinds` is hashable and part of the program's cache key."""

    structure: Any
    leaves: list[Any]
    kinds: tuple[Any, ...]

    @property
    def arrays(self) -> list[Any]:
        """The traced arguments."""
        return [leaf for leaf in self.leaves if _is_traced(leaf)]

    def with_arrays(self, arrays: list[Any]) -> tuple[Any, Any]:
        """Returns `(args, kwargs)` with the traced arguments replaced."""
        remaining = iter(arrays)
        leaves = [next(remaining) if _is_traced(leaf) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def flatten_call(args: object, kwargs: object) -> Call:
    """Flattens arguments: arrays and Python numbers are traced, all others are static."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
    leaves = [on_one_device(leaf) if is_explicit(leaf) else leaf for leaf in leaves]
    kinds = tuple(_kind(leaf) if _is_traced(leaf) else Static(leaf) for leaf in leaves)
    return Call(structure, leaves, kinds)


def _is_traced(leaf: object) -> bool:
    if is_array(leaf):
        return True
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, bool(leaf.aval.weak_type)
    if hasattr(leaf, "shape"):
        require_exact_integers([leaf], lambda _: "An argument")
        return leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), False
    return (), type(leaf), True


class _FunctionScope(keras.StatelessScope):
    """Intercepts Keras variables without a strategy; all others use the trace directly."""

    def __init__(self, trace: FunctionTrace) -> None:
        super().__init__(initialize_variables=False)
        self._function_trace = trace

    def get_current_value(self, variable: object) -> Any:
        if home_of(variable) is not None:
            return None
        return self._function_trace.load(variable, getattr(variable, "_value", None))

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if home_of(variable) is not None:
            variable.store_whole(value)
        else:
            self._function_trace.store(variable, value)


class _Results:
    """Results of a function: arrays become program outputs, other objects are stored here."""

    def __init__(self) -> None:
        self.structure: Any = None
        self.leaves: list[tuple[bool, Any]] = []
        self.is_per_replica: list[bool] = []

    def flatten(self, result: object) -> list[Any]:
        wholes, self.structure = jax.tree.flatten(as_values(result), is_leaf=_is_whole)
        outputs: list[Any] = []
        self.leaves, self.is_per_replica = [], []
        for leaf in wholes:
            if isinstance(leaf, PerReplica) and leaf.stacked is not None:
                self.leaves.append((True, leaf.lengths))
                self.is_per_replica.append(True)
                outputs.append(leaf.stacked)
            elif isinstance(leaf, Tracer | jax.Array) or is_array(leaf):
                self.leaves.append((True, None))
                self.is_per_replica.append(False)
                outputs.append(jnp.asarray(leaf))
            else:
                self.leaves.append((False, leaf))
        return outputs

    def rebuild(self, outputs: list[Any]) -> Any:
        remaining = iter(zip(outputs, self.is_per_replica, strict=True))
        leaves: list[Any] = []
        for is_output, static in self.leaves:
            if not is_output:
                leaves.append(static)
                continue
            output, is_per_replica = next(remaining)
            if is_per_replica:
                leaves.append(PerReplica(stacked=output, lengths=static))
            else:
                leaves.append(output.addressable_data(0) if len(output.devices()) > 1 else output)
        return jax.tree.unflatten(self.structure, leaves)


def _is_whole(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, PerReplica)


class _Attempt:
    """One trace with `candidates` as variable inputs; it may discover more variables."""

    def __init__(
        self, fn: Callable[..., Any], call: Call, candidates: list[Any], builds: KnownBuilds
    ) -> None:
        self.fn = fn
        self._call = call
        self.candidates = candidates
        self._builds = builds
        self.trace = FunctionTrace({})
        self.results = _Results()
        self.summaries: CollectedSummaries | None = None

    def carry_out(self) -> Any:
        """Returns the jaxpr; None if it created variables without values."""
        avals = [_aval(_stored(variable)) for variable in self.candidates]
        try:
            return jax.make_jaxpr(self._traced)(avals, self._call.arrays, np.False_)
        except NeedsInitialization as needed:
            self._builds.found += needed.builds
            return None

    def _traced(self, values: list[Any], arrays: list[Any], records: object) -> Any:
        pairs = zip(self.candidates, values, strict=True)
        values_by_id = {id(variable): value for variable, value in pairs}
        self.trace = FunctionTrace(values_by_id, self._builds)
        args, kwargs = self._call.with_arrays(arrays)
        summaries = Collector(records)
        with tracing_function(self.trace), _FunctionScope(self.trace), summaries:
            outputs = self.results.flatten(call_with_copies(self.fn, args, kwargs))
        values_of_summaries, self.summaries = summaries.results()
        outputs += [jnp.asarray(value) for value in values_of_summaries]
        return [self.trace.value_of(v) for v in self.trace.written.values()], outputs


@dataclasses.dataclass
class KnownVariables:
    """Candidate variables: those of `strategies`, and `foreign` ones without any, by id."""

    strategies: list[Any] = dataclasses.field(default_factory=list[Any])
    foreign: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])

    def all(self) -> list[Any]:
        """Returns the variables that have values."""
        owned = [variable for s in self.strategies for variable in s.variables.live()]
        return [*owned, *self.foreign.values()]


def trace_function(fn: Callable[..., Any], call: Call, known: KnownVariables) -> FunctionProgram:
    """Retraces a function until its inputs include every variable that it uses.

    Adds the variables and strategies that it finds to `known`.
    """
    strategies = known.strategies
    has_created = False
    builds = KnownBuilds()
    while True:
        attempt = _Attempt(fn, call, known.all(), builds)
        closed = attempt.carry_out()
        strategies += [s for s in attempt.trace.strategies if s not in strategies]
        for key, variable in attempt.trace.missed.items():
            home = home_of(variable)
            if home is None:
                known.foreign[key] = variable
            elif home.strategy not in strategies:
                strategies.append(home.strategy)
        created = [v for strategy in strategies for v in strategy.variables.uninitialized()]
        if closed is not None and not created and not attempt.trace.missed:
            for keep in builds.keep:
                keep()
            return FunctionProgram(closed, attempt, strategies)
        if created and has_created:
            raise created_again(created[0])
        has_created = has_created or bool(created)
        for strategy in strategies:
            initialize_created_variables(strategy)


def _stored(variable: keras.Variable) -> Any:
    return variable.storage if home_of(variable) is not None else variable.value


def _aval(value: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


class FunctionProgram:
    """One compiled trace of a function.

    Inputs of `closed` are the values of the attempt's candidates and the array arguments; outputs
    are the new values of written variables and the array results.
    """

    def __init__(self, closed: ClosedJaxpr, attempt: _Attempt, strategies: list[Any]) -> None:
        self.usage = Usage()
        trace, candidates = attempt.trace, attempt.candidates
        homes = [home_of(v) for v in [*trace.read.values(), *trace.written.values()]]
        used = {id(home.strategy) for home in homes if home is not None}
        used |= {id(s) for s in trace.strategies if s.topology.devices is not None}
        distributing = [strategy for strategy in strategies if id(strategy) in used]
        if len(distributing) > 1:
            raise RuntimeError(
                explain(
                    f"An sg.function uses variables of {distributing[0]} and {distributing[1]}.",
                    expected="one strategy per function.",
                    fix="write one function for each strategy.",
                )
            )
        self._topology = distributing[0].topology if distributing else None
        self._name = name_of(attempt.fn)
        self._is_of_several = self._topology is not None and self._topology.spans_processes
        if self._is_of_several:
            agree_on_initial_values(distributing[0].variables, distributing[0].topology)
            agree_on_program(self._name, closed)
        self._written = list(trace.written.values())
        written = {id(variable) for variable in self._written}
        self._read_only = [v for k, v in trace.read.items() if k not in written]
        self.trains = any(getattr(variable, "trainable", False) for variable in self._written)
        self._results = attempt.results
        self.summaries = attempt.summaries
        places = {id(v): index for index, v in enumerate([*self._written, *self._read_only])}
        order = [places.get(id(variable)) for variable in candidates]
        num_written = len(self._written)

        def run(
            written: list[Any], read_only: list[Any], arrays: list[Any], records: object
        ) -> Any:
            values = [*written, *read_only]
            avals = closed.in_avals[: len(order)]
            inputs = [
                jax.lax.full(aval.shape, 0, aval.dtype) if place is None else values[place]
                for place, aval in zip(order, avals, strict=True)
            ]
            outputs = jaxpr_as_fun(closed)(*inputs, *arrays, records)
            token = jnp.zeros((), bool) if self._is_of_several else ()
            return list(outputs[:num_written]), list(outputs[num_written:]), token

        self._run = jax.jit(run, donate_argnums=0, out_shardings=self._out_shardings())

    def _out_shardings(self) -> Any:
        topology = self._topology
        if topology is None or (topology.num_replicas == 1 and topology.groups is None):
            return None
        copied, stacked = topology.replicated, topology.stacked
        variables = [stored_sharding(variable, topology) for variable in self._written]
        results = [stacked if split else copied for split in self._results.is_per_replica]
        results += [copied] * (self.summaries.structure.num_leaves if self.summaries else 0)
        return variables, results, copied if self._is_of_several else ()

    def written_values(self) -> list[Any]:
        """Returns the values of the variables that the function writes."""
        return [_stored(variable) for variable in self._written]

    def run(self, arrays: list[Any]) -> Any:
        """Runs the function on its array arguments, stores its writes and returns its result."""
        written = self.written_values()
        read_only = [_stored(variable) for variable in self._read_only]
        arrays = [self._on_devices(array) for array in arrays]
        recording = begin_recording(self.summaries.every) if self.summaries else None
        records = np.bool_(recording is not None)

        def start() -> tuple[Any, Any]:
            new_values, outputs, token = self._run(written, read_only, arrays, records)
            return (new_values, outputs), token

        if self._topology is not None and self._is_of_several:
            platform = self._topology.platform
            new_values, outputs = run_together(self._name, start, platform=platform)
        else:
            (new_values, outputs), _ = start()
        for variable, value in zip(self._written, new_values, strict=True):
            if home_of(variable) is not None:
                variable.storage = value
            else:
                variable.assign(value if self._topology is None else jax.device_get(value))
        num_results = len(self._results.is_per_replica)
        if recording is not None and self.summaries is not None:
            values = jax.tree.unflatten(self.summaries.structure, outputs[num_results:])
            recording.keep(self.summaries.summaries, values, None)
        return self._results.rebuild(outputs[:num_results])

    def _on_devices(self, array: object) -> Any:
        """Moves an array committed to other devices; the compiled call moves all others."""
        if self._topology is None or not isinstance(array, jax.Array):
            return array
        if not array.committed and not self._is_of_several:
            return array
        if array.sharding.device_set == set(self._topology.all_devices or ()):
            return array
        return self._topology.replicate(array)


_recompilations = Recompilations()


class Function:
    """A function made by `sg.function`: traced once per kind of arguments, then runs compiled."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._programs: OrderedDict[Any, FunctionProgram] = OrderedDict()
        self._known = KnownVariables()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds the function to an instance if it was defined in a class."""
        return self if instance is None else types.MethodType(self, instance)

    @filters_traceback
    @outside_context_mesh
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the function; traces it first for new kinds of arguments."""
        if config.runs_eagerly() or not _is_outermost():
            return rebuilt(as_values(self._fn(*args, **kwargs)))
        call = flatten_call(args, kwargs)
        current = get_strategy() if has_strategy() else None
        key = (call.structure, call.kinds, current)
        program = self._programs.get(key)
        if program is not None and program.summaries is not None:
            program = self._programs.get((key, trace_key()))
        if program is None:
            if current is not None and current not in self._known.strategies:
                self._known.strategies.append(current)
            program = trace_function(self._fn, call, self._known)
            self._programs[key] = program
            kinds = ArgumentKinds(call.structure, call.kinds)
            reason = _recompilations.note(self._fn, kinds, program.usage, hash(current))
            note_compilation(self._known.strategies, self._fn, reason)
            if program.summaries is not None:
                self._programs[(key, trace_key())] = program
            while len(self._programs) > settings.read("program_cache_size"):
                self._programs.popitem(last=False)
        else:
            program.usage.is_reused = True
        self._programs.move_to_end(key)
        explained = ExplainsExhaustedMemory(self._known.all)
        with observed_call(1, program.written_values, trains=program.trains), explained:
            return program.run(call.arrays)


def function(
    fn: Callable[..., Any] | None = None,
    *,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    input_signature: object = None,
) -> Any:
    """Compiles a step, with its calls of `run` and `reduce`, into one program.

    Call the result in cross-replica context. Arrays, `PerReplica` values and Python numbers among
    the arguments are traced; strings, bools and other objects are part of the program. Variables
    that the function reads and assigns become inputs and outputs. Python side effects happen during
    tracing: once for each structure, shapes and dtypes of the arguments, and once more when the
    function uses or creates new variables. With `sg.config.run_eagerly(True)`, inside another
    `sg.function` and in a replica function, the Python function itself is called.

    Args:
        fn: the function; it may be a method. None for a decorator with arguments.
        jit_compile: accepted for compatibility and ignored; the program is always compiled.
        reduce_retracing: accepted for compatibility and ignored; each kind of arguments has a
            program.
        input_signature: must be None.

    Returns:
        A callable with the arguments and the results of `fn`; a decorator without `fn`.

    Raises:
        TypeError: `input_signature` is given, or `fn` is not callable.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @sg.function
        ... def step(batch):
        ...     sums = strategy.run(jax.numpy.sum, args=(batch,))
        ...     return strategy.reduce("sum", sums, axis=None)
        >>> (batch,) = strategy.distribute_dataset([np.arange(4)])
        >>> step(batch)
        Array(6, dtype=int32)

    Source: TF 2.21 polymorphic_function.py, function.
    """
    _check_arguments(fn, input_signature)
    return Function if fn is None else Function(fn)


def _check_arguments(fn: Any, input_signature: Any) -> None:
    if input_signature is not None:
        raise TypeError(
            explain(
                f"sg.function received input_signature={input_signature!r}.",
                expected="None, because each kind of arguments gets its own program.",
                fix="remove it, and pass arguments of the shapes and dtypes that you want.",
            )
        )
    if fn is not None and not callable(fn):
        raise TypeError(
            explain(
                f"sg.function received {fn!r} of type {type(fn).__name__}.",
                expected="a function.",
                fix="write @sg.function above the function.",
            )
        )


def _is_outermost() -> bool:
    """Returns True if this thread runs no other function and no replica function."""
    in_replica = has_strategy() and get_replica_context() is not None
    return current_function_trace() is None and not in_replica

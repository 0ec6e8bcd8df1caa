"""`sg.function`: the public decorator, and its cache of compiled programs."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from stratagem import config
from stratagem.contexts import current_function_trace, get_strategy, has_strategy
from stratagem.devices.context_mesh import outside_context_mesh
from stratagem.execution.context.replica import get_replica_context
from stratagem.execution.functions.function_program import (
    FunctionProgram,
    KnownVariables,
    flatten_call,
    trace_function,
)
from stratagem.execution.programs.argument_differences import ArgumentKinds
from stratagem.execution.programs.compilations import note_compilation
from stratagem.execution.programs.recompilations import Recompilations
from stratagem.execution.summary.settings import trace_key
from stratagem.execution.tracing.returned_values import as_values, rebuilt
from stratagem.messages import explain
from stratagem.observe.profiling.step_observer import observed_call
from stratagem.tracebacks import filters_traceback
from stratagem.variables.exhausted_memory import ExplainsExhaustedMemory

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
            while len(self._programs) > config.program_cache_size():
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

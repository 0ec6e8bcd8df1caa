"""`sg.function`: steps with `run` and `reduce` as Python, all other functions as one program."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import config
from stratagem import contexts as stack
from stratagem.config import filters_traceback
from stratagem.devices.mesh import is_explicit, on_one_device, outside_context_mesh
from stratagem.devices.shards import require_exact_integers
from stratagem.errors import check_type, explain
from stratagem.execution.summary.collector import is_tracing
from stratagem.execution.tracing.tracer import as_values, rebuilt
from stratagem.variables.distributed import is_array, is_distributed
from stratagem.variables.exhausted_memory import explain_exhausted_memory


class Function:
    """A function made by `sg.function`.

    Its first call finds out whether it uses a strategy. If so, all calls run it as Python.
    Otherwise the default strategy compiles it, from the second call on.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._uses_strategy: bool | None = None  # None before the first call

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds the function to an instance if it was defined in a class."""
        return self if instance is None else types.MethodType(self, instance)

    @filters_traceback
    @outside_context_mesh
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the function, or the program that it was compiled to."""
        if config.runs_eagerly() or is_tracing():
            return self._call(args, kwargs)
        args, kwargs = _with_arrays(args), _with_arrays(kwargs)
        # The default strategy would hide that of a scope from the function.
        is_in_scope = stack.current_frame() is not None
        if self._uses_strategy or is_in_scope or _has_distributed((args, kwargs)):
            return self._call(args, kwargs)
        if self._uses_strategy is None:
            before = stack.num_uses()
            result = self._call(args, kwargs)
            self._uses_strategy = stack.num_uses() != before
            return result
        default = stack.get_strategy()
        try:
            with stack.refusing_strategies():
                return default.executor.run(self._fn, args, kwargs)
        except stack.StrategyUsed:  # not in the first call, but in this one
            self._uses_strategy = True
        except Exception as error:
            explain_exhausted_memory(error, default.variables.live)
            raise
        return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        return rebuilt(as_values(self._fn(*args, **kwargs)))


def _has_distributed(arguments: Any) -> bool:
    return any(map(is_distributed, jax.tree.leaves(arguments, is_leaf=is_distributed)))


def _with_arrays(arguments: Any) -> Any:
    """Returns arguments with the arrays that the compiled function would get."""
    return jax.tree.map(
        _as_array, arguments, is_leaf=lambda one: not isinstance(one, list | tuple | dict)
    )


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic) and is_array(leaf):
        require_exact_integers([leaf], lambda _: "An argument")
        return jnp.asarray(leaf)
    if isinstance(leaf, jax.Array) and is_explicit(leaf):
        return on_one_device(leaf)
    return leaf


def function(
    fn: Callable[..., Any] | None = None,
    *,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    input_signature: object = None,
) -> Any:
    """Makes a step of a loop, with its calls of `run` and `reduce`, or compiles a function.

    A function that uses a strategy runs as Python on each call: one that calls `run`, `reduce` or
    another method, iterates a distributed dataset, or reads or assigns variables of a strategy. Its
    replica functions are compiled, each once for each kind of arguments.

    Any other function runs as Python on its first call. Later calls run one compiled program for
    each kind of arguments: arrays and Python numbers among the arguments are traced; strings, bools
    and other objects are part of the program; variables that the function reads and assigns become
    inputs and outputs. Python side effects then happen only during tracing, once or twice for each
    kind of arguments, and Python `if` and `while` cannot depend on traced values.

    The Python function itself is also called in the scope of a strategy, in a replica function,
    within `jax.jit`, and with `sg.config.run_eagerly(True)`.

    Args:
        fn: the function; it may be a method. None for a decorator with arguments.
        jit_compile: accepted for compatibility and ignored; what can be compiled is.
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
    if fn is not None:
        check_type("fn", fn, callable, "a function", owner="sg.function")

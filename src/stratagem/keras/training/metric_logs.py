"""Results of all metrics of a model in one program, per batch and at the end of an epoch."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.devices.abstract_devices import placeholder
from stratagem.devices.lockstep import (
    meets_on_host,
    run_together,
    runs_separately,
    wait_until_ready,
)
from stratagem.errors import explain
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    JAXTrainer,
    calls_in_thread,
    get_stateless_scope,
    last_drawn_s,
    pythonify_logs,
)
from stratagem.keras.training.active_fit import uses_batch_logs
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.variables.components import aggregate_components, gather_together
from stratagem.variables.late_reads import LateRead
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy

# Logs of steps whose values are read from the devices only when a callback uses them.

_UNREAD = object()


class LateLogs(dict[str, Any]):
    """A dict of known names whose values are those of `read()`, called when one is first used.

    `source` is the read of variables that `read` asks for, if any.
    """

    def __init__(
        self, names: Iterable[str], read: Callable[[], Any], source: LateRead | None = None
    ) -> None:
        super().__init__(dict.fromkeys(names, _UNREAD))
        self._read: Callable[[], Any] | None = read
        self.source = source
        self.is_shared = False

    def load(self) -> None:
        """Reads the values, if they were not."""
        if self._read is not None:
            values = self._read()
            self._read = None
            super().update(values)

    def forget_if_shared(self) -> None:
        """Drops the read if callbacks had the logs and no one kept them."""
        if self.is_shared and self.source is not None:
            self.source.drop()

    def __iter__(self) -> Iterator[str]:  # makes `dict(logs)` call `__getitem__`
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:  # pickled and copied as a plain dict
        return dict, (dict(self),)


def _loading(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    @functools.wraps(original)
    def method(self: LateLogs, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__getitem__", "get", "items", "values", "copy", "__eq__", "__ne__", "__repr__"),
    *("__or__", "__ror__", "__ior__", "__setitem__", "__delitem__"),
    *("clear", "pop", "popitem", "setdefault", "update"),
):
    setattr(LateLogs, _name, _loading(_name))


def _dict(names: Iterable[str], values: Iterable[Any]) -> Any:
    return dict(zip(names, values, strict=True))


# As JAX flattens a dict: by sorted keys.
jax.tree_util.register_pytree_node(
    LateLogs,
    lambda logs: ([logs[name] for name in sorted(logs)], tuple(sorted(logs))),
    _dict,
)


@patches(
    keras.callbacks.CallbackList,
    *("on_train_batch_end", "on_test_batch_end"),
    why="a callback that uses no logs does not wait for the step",
)
def sharing_late_logs(original: Callable[..., Any]) -> Any:
    """Returns the method of a `CallbackList` that gives callbacks numbers read on first use.

    Keras converts the logs of each batch to numbers first, which waits for the step.
    """
    name = original.__name__
    in_test = name == "on_test_batch_end"

    @functools.wraps(original)
    def shared(self: keras.callbacks.CallbackList, batch: int, logs: Any = None) -> None:
        if not isinstance(logs, LateLogs):
            original(self, batch, logs)
            return
        if calls_in_thread(self, in_test=in_test) and any(map(_needs_thread, self.callbacks)):
            original(self, batch, dict(logs))  # read now: the next step starts meanwhile
            return
        numbers = LateLogs(sorted(logs), lambda: pythonify_logs(logs))
        for callback in self.callbacks:
            getattr(callback, name)(batch, logs=numbers)
        kept = weakref.ref(numbers)
        del numbers
        if kept() is not None and logs.source is not None:
            logs.source.result()
        logs.is_shared = True

    return shared


def _needs_thread(callback: keras.callbacks.Callback) -> bool:
    """Returns True if a callback may wait for each step; a bar does so 20 times a second."""
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return last_drawn_s(callback.progbar) is None
    return uses_batch_logs(callback)


@patches(
    keras.callbacks.ProgbarLogger,
    "_update_progbar",
    why="a progress bar waits only for the steps for which it is drawn",
)
def reading_when_drawn(original: Callable[..., Any]) -> Any:
    """Returns the method of `ProgbarLogger` that uses logs only if the bar is drawn now."""

    @functools.wraps(original)
    def update(self: keras.callbacks.ProgbarLogger, batch: int, logs: Any = None) -> None:
        bar: Any = self.progbar
        drawn_s = last_drawn_s(bar) if isinstance(logs, LateLogs) else None
        if drawn_s is None or time.time() - drawn_s >= bar.interval:
            original(self, batch, logs)
            return
        interval, bar.interval = bar.interval, math.inf  # as the interval could end meanwhile
        try:
            original(self, batch)
        finally:
            bar.interval = interval

    return update


@patches(
    JAXTrainer,
    "get_metrics_result",
    why="one program computes all results, and one collective combines them",
)
def results_at_once(original: Callable[..., Any]) -> Any:
    """Returns `get_metrics_result` of a model that computes all results in one program."""

    @functools.wraps(original)
    def results(self: keras.Model) -> Any:
        is_traced = isinstance(jnp.zeros(()), Tracer)
        if is_traced or get_stateless_scope() is not None:  # Inside a step or inside `_results`.
            return original(self)
        logs = _logs_of(self)
        for one in logs:  # the steps of either function may be under way
            one.settle()
        if logs and type(self).get_metrics_result is results:
            return logs[0].so_far()
        # One exchange between processes instead of one for each variable of each metric.
        variables = [one for one in self.metrics_variables if isinstance(one, DistributedVariable)]
        asking = [variable for variable in variables if variable.asks_all_processes()]
        gather_together([(variable.whole, variable.storage) for variable in asking])
        return original(self)

    return results


def _logs_of(model: keras.Model) -> list[MetricLogs]:
    """Returns the `MetricLogs` of a model's step functions."""
    functions = (model.train_function, model.test_function)
    found = [getattr(function, "metric_logs", None) for function in functions]
    return [logs for logs in found if logs is not None]


class _HasMetrics(Protocol):
    """A Keras model, or anything else with metrics."""

    @property
    def metrics_variables(self) -> list[Any]:
        """Variables of all metrics."""
        ...

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of all metrics by name."""
        ...


class MetricLogs:
    """Results of a model's metrics over all replicas.

    `before` is called before results are read; it waits for steps in flight.
    """

    def __init__(
        self, model: _HasMetrics, strategy: Strategy, before: Callable[[], None] | None = None
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._before = before
        self._program: Any = None
        self._host_program: Any = None
        self._variables: list[Any] = []
        self._names: list[str] | None = None
        self._are_flat = True

    def current(self) -> dict[str, Any]:
        """Returns the metric results after `before`, without waiting for the devices."""
        self.settle()
        return self.so_far()

    def settle(self) -> None:
        """Calls `before`."""
        if self._before is not None:
            self._before()

    def so_far(self) -> dict[str, Any]:
        """Returns the metric results of the completed steps."""
        stored = self._stored()
        if self._strategy.topology.is_abstract:  # Abstract variables have no values.
            shapes = jax.eval_shape(self._program, stored)
            return jax.tree.map(lambda one: placeholder(one.shape, one.dtype), dict(shapes))
        if not self._strategy.topology.spans_processes:
            return dict(self._program(stored))
        if meets_on_host(stored):
            return dict(self._host_program(self._of_members()))

        def start() -> tuple[Any, Any]:
            results = self._program(stored)
            return results, jax.tree.leaves(results)

        results = run_together("metrics", start, platform=self._strategy.topology.platform)
        wait_until_ready(results)
        # A metric's result may be a dict or another structure.
        return jax.tree.map(lambda value: value.addressable_data(0), dict(results))

    def _of_members(self) -> list[Any]:
        """Returns all components, which the processes bring together on their hosts."""
        asking = [one for one in self._variables if _is_on_read(one)]
        gather_together([(variable.whole, variable.storage) for variable in asking])
        return [
            variable.whole.gathered if _is_on_read(variable) else _own(variable)
            for variable in self._variables
        ]

    def compile_ahead(self) -> None:
        """Compiles the program of results, in a process that has not joined its group yet."""
        self._stored()
        count = self._strategy.topology.num_replicas
        stored = [
            np.zeros((count, *variable.shape), variable.dtype)
            if _is_on_read(variable)
            else _own(variable)
            for variable in self._variables
        ]
        self._names = list(self._program(stored))

    def late(self) -> dict[str, Any]:
        """Returns the results so far, computed only if they are used.

        Several processes compute them at once, and abstract devices never do.
        """
        stored, topology = self._stored(), self._strategy.topology
        if self._names is None or topology.spans_processes or topology.is_abstract:
            results = self.so_far()
            self._names = list(results)
            self._are_flat = not any(isinstance(one, dict) for one in results.values())
            return results
        if not self._are_flat:  # Keras flattens them, so that their names are not known
            return self.so_far()
        source = LateRead(functools.partial(self._of_values, stored))
        return LateLogs(self._names, source.result, source)

    def _of_values(self, stored: list[Any]) -> dict[str, Any]:
        if any(value.is_deleted() for value in stored):  # JAX would crash
            raise RuntimeError(
                explain(
                    "The logs of a batch were used after a program had taken the memory of the "
                    "metrics' variables.",
                    expected="programs of Stratagem and Keras, before which the logs are read.",
                    fix="call dict(logs) in the callback before you donate values of variables "
                    "to a program of your own.",
                )
            )
        return self._program(stored)

    def _stored(self) -> list[Any]:
        """Returns the values of all variables of metrics, for the program of their results."""
        variables = self._model.metrics_variables
        if self._program is None or [id(v) for v in variables] != [id(v) for v in self._variables]:
            self._variables, self._names = variables, None
            several = self._strategy.topology.spans_processes and not runs_separately()
            copied = self._strategy.topology.replicated if several else None
            self._program = jax.jit(self._results, out_shardings=copied)
            self._host_program = self._program if copied is None else jax.jit(self._results)
        return [variable.storage if home_of(variable) else variable.value for variable in variables]

    def placeholder(self) -> dict[str, Any]:
        """Returns metric names with zeros, for logs of which Keras uses only the names."""
        if self._names is None:
            # One metric may report several names; only its result shows them.
            self.late()
            assert self._names is not None
        return dict.fromkeys(self._names, 0.0)

    def _results(self, stored: list[Any]) -> Any:
        mapping: list[tuple[Any, Any]] = []
        for variable, value in zip(self._variables, stored, strict=True):
            if _is_on_read(variable):
                home = home_of(variable)
                assert home is not None
                value = aggregate_components(value, home.aggregation, variable.path)
            mapping.append((variable, value))
        with keras.StatelessScope(mapping):
            return self._model.get_metrics_result()


def _is_on_read(variable: Any) -> bool:
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


def _own(variable: Any) -> Any:
    """Returns a value that is the same on all processes, as this one has it."""
    return variable.storage.addressable_data(0) if home_of(variable) else variable.value

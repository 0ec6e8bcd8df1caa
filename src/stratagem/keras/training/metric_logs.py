"""Results of all metrics of a model in one program, per batch and at the end of an epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.devices.abstract_devices import placeholder
from stratagem.devices.lockstep import (
    run_together,
    runs_separately,
    wait_until_ready,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    JAXTrainer,
    get_stateless_scope,
)
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.variables.components import aggregate_components, gather_together
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


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
        self._variables: list[Any] = []
        self._names: list[str] | None = None

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
        if runs_separately():
            return dict(self._program(self._of_members()))

        def start() -> tuple[Any, Any]:
            results = self._program(stored)
            return results, jax.tree.leaves(results)

        results = run_together("metrics", start, platform=self._strategy.topology.platform)
        wait_until_ready(results)
        # A metric's result may be a dict or another structure.
        return jax.tree.map(lambda value: value.addressable_data(0), dict(results))

    def _of_members(self) -> list[Any]:
        """Returns all components in an elastic group, which each process has after a step."""
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

    def _stored(self) -> list[Any]:
        """Returns the values of all variables of metrics, for the program of their results."""
        variables = self._model.metrics_variables
        if self._program is None or [id(v) for v in variables] != [id(v) for v in self._variables]:
            self._variables, self._names = variables, None
            several = self._strategy.topology.spans_processes and not runs_separately()
            copied = self._strategy.topology.replicated if several else None
            self._program = jax.jit(self._results, out_shardings=copied)
        return [variable.storage if home_of(variable) else variable.value for variable in variables]

    def placeholder(self) -> dict[str, Any]:
        """Returns metric names with zeros, for logs of which Keras uses only the names."""
        if self._names is None:
            # One metric may report several names; only its result shows them.
            self._names = list(self.so_far())
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

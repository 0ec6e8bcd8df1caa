"""Replica step of a model function: tracing, running and values for hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.named_values import naming_values
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.execution.context.replica import ReplicaContext, get_replica_context
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.keras.numerics.step_mode import example_fraction

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


def spec_hooks(spec: EstimatorSpec, mode: str) -> tuple[SessionRunHook, ...]:
    """Returns a spec's hooks for a mode, the chief's hooks last."""
    groups: dict[str, Sequence[Any] | None] = {"eval": spec.evaluation_hooks}
    groups["infer"] = spec.prediction_hooks
    groups["train"] = (*(spec.training_hooks or ()), *(spec.training_chief_hooks or ()))
    return tuple(groups[mode] or ())


@dataclasses.dataclass(frozen=True)
class _ModelCall:
    """Result of one call of the model function."""

    spec: EstimatorSpec
    values: dict[str, Any]
    extra: Any


class ModelStep:
    """Step of a model function in one mode; `spec` is its result from the last trace."""

    mode: str

    def __init__(self, function: ModelFunction, store: VariableStore, strategy: Strategy) -> None:
        self._function = function
        self.store = store
        self.strategy = strategy
        self.spec: EstimatorSpec | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the spec, which holds tracers."""
        return {**vars(self), "spec": None}

    def step(self, features: object, labels: object) -> Any:
        """Runs in replica context; `labels` is None if there are none."""
        raise NotImplementedError

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step, which creates its variables, without running it."""
        arguments = flatten_arguments(batch, {}, num_replicas=self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            executor: Any = self.strategy.executor
            executor.program(self.step, arguments)
        assert self.spec is not None
        return self.spec

    def reset(self) -> None:
        """Resets what the steps of a loop accumulate. Call after `prepare`."""

    def run(self, batch: tuple[Any, Any]) -> Any:
        """Runs the step on all replicas."""
        return self.strategy.run(self.step, args=batch)

    def call(
        self,
        features: object,
        labels: object,
        extra: Callable[[EstimatorSpec], Any] = lambda spec: None,
    ) -> _ModelCall:
        """Calls the model function once, then `extra` with its spec."""
        with self.store.call(self.mode), naming_values() as named:
            spec = self._function(features, labels, self.mode)
            computed = extra(spec)
        self.spec = spec
        tensors = [dict(getattr(hook, "tensors", {}) or {}) for hook in spec_hooks(spec, self.mode)]
        values = {
            "loss": spec.loss,
            "named": dict(named),
            # Tensors given as names are looked up when they are fetched.
            "held": [
                {name: value for name, value in one.items() if isinstance(value, jax.Array)}
                for one in tensors
            ],
        }
        return _ModelCall(spec, values, computed)


def reported(values: object) -> Any:
    """Averages floating-point scalars over replicas, as hooks see them. Call in replica context."""
    context = get_replica_context()
    assert context is not None
    return jax.tree.map(lambda value: _average(value, context), values)


def _average(value: object, context: ReplicaContext) -> Any:
    value = jnp.asarray(value)
    is_average = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating)
    if not is_average or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce("sum", value * example_fraction(context, value.dtype))

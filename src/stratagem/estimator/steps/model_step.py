"""What one step of a model function is on a replica, whatever its mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.context import ReplicaContext, get_replica_context
from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.named_values import naming_values
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.keras.step_mode import example_fraction

__all__ = ["ModelStep", "hooks_of", "reported"]


def hooks_of(spec: EstimatorSpec, mode: str) -> tuple[SessionRunHook, ...]:
    """Returns the hooks that a model function has made for a mode, those of the chief last.

    Args:
        spec: what it returned.
        mode: one of `ModeKeys`.
    """
    groups: dict[str, Sequence[Any] | None] = {"eval": spec.evaluation_hooks}
    groups["infer"] = spec.prediction_hooks
    groups["train"] = (*(spec.training_hooks or ()), *(spec.training_chief_hooks or ()))
    return tuple(groups[mode] or ())


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call of the model function has given.

    Args:
        spec: what it returned.
        values: what hooks may fetch: the loss, values by name, and those that its hooks hold.
        extra: what `ModelStep.call` was to compute beside.
    """

    spec: EstimatorSpec
    values: dict[str, Any]
    extra: Any


class ModelStep:
    """Calls a model function as the step of one mode, under one strategy.

    Args:
        function: the model function.
        store: its variables under the strategy.
        strategy: the strategy.

    `spec` is what the model function returned when the step was traced the last time.
    """

    mode: str

    def __init__(self, function: ModelFunction, store: VariableStore, strategy: Any) -> None:
        self._function = function
        self.store = store
        self.strategy = strategy
        self.spec: EstimatorSpec | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs of it: no values of a trace."""
        return {**vars(self), "spec": None}

    def step(self, features: Any, labels: Any) -> Any:
        """The replica function.

        Args:
            features: of this replica.
            labels: of this replica; None where there are none.
        """
        raise NotImplementedError

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step, which makes its variables, and runs nothing.

        Args:
            batch: features and labels of all replicas.

        Returns:
            What the model function returned.
        """
        arguments = flatten_arguments(batch, {}, num_replicas=self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            self.strategy.executor.program(self.step, arguments)
        assert self.spec is not None
        return self.spec

    def run(self, batch: tuple[Any, Any]) -> Any:
        """Runs the step on all replicas.

        Args:
            batch: features and labels of all replicas.

        Returns:
            What `step` returned, as `Strategy.run` returns it.
        """
        return self.strategy.run(self.step, args=batch)

    def call(
        self,
        features: Any,
        labels: Any,
        extra: Callable[[EstimatorSpec], Any] = lambda spec: None,
    ) -> _Call:
        """Calls the model function once.

        Args:
            features: of this replica.
            labels: of this replica.
            extra: called with what it returned; may make variables, too.
        """
        with self.store.call(self.mode), naming_values() as named:
            spec = self._function(features, labels, self.mode)
            computed = extra(spec)
        self.spec = spec
        held = [dict(getattr(hook, "tensors", None) or {}) for hook in hooks_of(spec, self.mode)]
        values = {
            "loss": spec.loss,
            "named": dict(named),
            # What is a name is looked up when it is fetched.
            "held": [
                {name: value for name, value in one.items() if isinstance(value, jax.Array)}
                for one in held
            ],
        }
        return _Call(spec, values, computed)


def reported(values: Any) -> Any:
    """Returns values as hooks get them: scalars with a fraction as their average over replicas.

    Call in replica context.

    Args:
        values: pytree of this replica's values.
    """
    context = get_replica_context()
    assert context is not None
    return jax.tree.map(lambda value: _average(value, context), values)


def _average(value: Any, context: ReplicaContext) -> Any:
    value = jnp.asarray(value)
    is_average = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating)
    if not is_average or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce("sum", value * example_fraction(context, value.dtype))

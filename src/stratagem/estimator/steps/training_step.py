"""Training step: gradients of a model function, applied by its optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from stratagem.errors import explain
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.spec import EstimatorSpec, Minimize, as_train_ops
from stratagem.estimator.steps.model_step import ModelStep, reported
from stratagem.execution import summary
from stratagem.execution.gradient import value_and_grad
from stratagem.execution.summary.collector import Collector
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope, is_uninitialized
from stratagem.keras.numerics.optimizer import build_in_replica
from stratagem.keras.numerics.step_mode import StepMode, step_mode
from stratagem.parameter_server.keras.optimizer import give_to_servers, share_name
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    import keras

    from stratagem.strategies.base.strategy import Strategy
    from stratagem.variables.registry import Home


@dataclasses.dataclass(frozen=True)
class _UpdatePlan:
    """Variables, losses and optimizers of a model function's updates, from its first call.

    `variables[i]` and `optimizers[i]` belong to update i; `losses` groups updates by loss.
    """

    variables: list[list[Any]]
    losses: list[list[int]]
    optimizers: list[Any]

    def of_loss(self, ops: list[int]) -> list[Any]:
        """Returns the distinct variables of some updates."""
        return _distinct(variable for op in ops for variable in self.variables[op])


class TrainingStep(ModelStep):
    """Computes `spec.train_op` on each replica, with gradients averaged over replicas.

    The model function runs inside the differentiated function. Each of several losses is
    differentiated in a separate call from the same state; only the call for the first update's
    loss keeps its assignments and summaries.
    """

    mode = ModeKeys.TRAIN
    _plan: _UpdatePlan | None = None

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step and places its variables on parameter servers, if any."""
        spec = super().prepare(batch)
        if self.strategy.placement.is_remote:
            assert self._plan is not None
            self.strategy.placement.remote.variables.place(self.store.global_step)
            for optimizer in self._plan.optimizers:
                give_to_servers(optimizer)
        return spec

    def step(self, features: object, labels: object) -> Any:
        """Makes one update and returns values for hooks."""
        with step_mode(StepMode.MEAN):
            if self._plan is None or not self.store.is_complete(self.mode):
                self._plan = self._find_plan(features, labels)
            if any(is_uninitialized(one) for one in self.store.variables_of(self.mode)):
                return {}  # the step is traced again, with initialized variables
            return self._train(self._plan, features, labels)

    def _find_plan(self, features: object, labels: object) -> _UpdatePlan:
        """Calls the model function once to find its updates, and drops its assignments."""
        outer = current_scope()
        assert outer is not None
        plans: list[_UpdatePlan] = []

        def plan(spec: EstimatorSpec) -> None:
            ops = as_train_ops(spec.train_op, spec.loss)
            trainable = self._trainable(scope)
            variables = [trainable if op.variables is None else list(op.variables) for op in ops]
            plans.append(_UpdatePlan(variables, _by_loss(ops), [op.optimizer for op in ops]))
            _build(ops, plans[0], self.strategy)

        with Collector(), ReplicaScope(outer.get_current_value) as scope:
            self.call(features, labels, plan)
        return plans[0]

    def _trainable(self, scope: ReplicaScope) -> list[Any]:
        """Returns the trainable variables that the model function created or read."""
        created = self.store.variables_of(self.mode)
        known = {id(variable) for variable in created}
        used: list[Any] = [
            variable
            for variable in self.strategy.variables.live()
            if id(variable) in scope.read_ids and id(variable) not in known
        ]
        for variable in used:
            home = home_of(variable)
            is_own = variable is not self.store.global_step
            if is_own and home is not None and not _is_of_metric(home):
                self.store.register(variable)
        return _distinct(variable for variable in [*created, *used] if variable.trainable)

    def _train(self, plan: _UpdatePlan, features: object, labels: object) -> Any:
        outer = current_scope()
        assert outer is not None
        grads: dict[int, list[Any]] = {}
        for group in plan.losses[1:]:
            with Collector(), ReplicaScope(outer.get_current_value):
                grads |= self._gradients(plan, group, features, labels)[0]
        first_grads, ops, values = self._gradients(plan, plan.losses[0], features, labels)
        grads |= first_grads
        for index, op in enumerate(ops):
            pairs = [
                (grad, variable)
                for grad, variable in zip(grads[index], plan.variables[index], strict=True)
                if grad is not None
            ]
            if not pairs:
                raise _no_gradients(op, plan.variables[index])
            op.optimizer.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        self.store.global_step.assign_add(1)  # other workers may have counted, too
        values = reported(values)
        summary.scalar("loss", values["loss"])
        return values

    def _gradients(
        self, plan: _UpdatePlan, group: list[int], features: object, labels: object
    ) -> tuple[dict[int, list[Any]], list[Minimize], Any]:
        """Returns the gradients of one loss by update, the updates, and the call's values."""
        found: list[list[Minimize]] = []

        def scaled_loss() -> Any:
            def build(spec: EstimatorSpec) -> list[Minimize]:
                ops = as_train_ops(spec.train_op, spec.loss)
                _build(ops, plan, self.strategy)
                return ops

            call = self.call(features, labels, build)
            found.append(call.extra)
            op = call.extra[group[0]]
            return op.optimizer.scale_loss(jnp.reshape(op.loss, ())), call.values

        variables = plan.of_loss(group)
        (_, values), grads = value_and_grad(scaled_loss, variables, has_aux=True)
        by_id = {id(v): grad for v, grad in zip(variables, grads, strict=True)}
        of_ops = {op: [by_id[id(variable)] for variable in plan.variables[op]] for op in group}
        return of_ops, found[-1], values


def _is_of_metric(home: Home) -> bool:
    return home.kind is VariableKind.ON_READ and home.aggregation.name == "SUM"


def _distinct(variables: Iterable[keras.Variable]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _by_loss(ops: list[Minimize]) -> list[list[int]]:
    """Groups updates by loss; an optimizer with loss scaling gets a group to itself."""
    groups: dict[tuple[int, Any], list[int]] = {}
    for index, op in enumerate(ops):
        scales = hasattr(op.optimizer, "inner_optimizer") or op.optimizer.loss_scale_factor
        groups.setdefault((id(op.loss), id(op.optimizer) if scales else None), []).append(index)
    return list(groups.values())


def _build(ops: list[Minimize], plan: _UpdatePlan, strategy: Strategy) -> None:
    """Builds the optimizers inside the model function call that created them."""
    for op, first in zip(ops, plan.optimizers, strict=True):
        same = [index for index, other in enumerate(ops) if other.optimizer is op.optimizer]
        if not op.optimizer.built:
            if strategy.placement.is_remote:
                share_name(op.optimizer, first, strategy.placement.remote.variables)
            targets = _distinct(variable for index in same for variable in plan.variables[index])
            build_in_replica(op.optimizer, targets, strategy)


def _no_gradients(op: Minimize, variables: list[Any]) -> ValueError:
    names = [variable.path for variable in variables]
    return ValueError(
        explain(
            f"The loss of {op.optimizer.name!r} depends on none of the variables {names}.",
            expected="a loss computed from trainable variables.",
            fix="compute the loss from a layer's output, or pass other variables as var_list.",
        )
    )

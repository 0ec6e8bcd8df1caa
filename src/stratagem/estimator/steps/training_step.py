"""A training step: gradients of the losses of a model function, applied by its optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from stratagem import summary
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_step import ModelStep, reported
from stratagem.estimator.train_op import Minimize, as_train_ops
from stratagem.execution import ReplicaScope, current_scope, value_and_grad
from stratagem.execution.tracing.created_variables import is_uninitialized
from stratagem.keras.optimizer import build_in_replica
from stratagem.keras.served_optimizer import give_to_servers, share_name
from stratagem.keras.step_mode import StepMode, step_mode
from stratagem.messages import explain
from stratagem.summary.collector import Collector
from stratagem.variables import VariableKind, home_of

__all__ = ["TrainingStep"]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which variables the updates of a model function are for, found out in its first call.

    Args:
        variables: of each update.
        losses: those updates that have one loss and so one gradient.
        optimizers: of each update. Later calls make others, which are the same to servers.
    """

    variables: list[list[Any]]
    losses: list[list[int]]
    optimizers: list[Any]

    def of_loss(self, ops: list[int]) -> list[Any]:
        """The variables of some updates together."""
        return _distinct(variable for op in ops for variable in self.variables[op])


class TrainingStep(ModelStep):
    """Trains: `spec.train_op` on each replica, with gradients averaged over all of them.

    A model function runs inside the function that is differentiated. Of two losses each is
    differentiated in a call of its own, all from the same state; what the call for the first
    update's loss assigns and writes as summaries is kept.
    """

    mode = ModeKeys.TRAIN
    _plan: _Plan | None = None

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step; servers get what they are to hold."""
        spec = super().prepare(batch)
        if self.strategy.placement.is_remote:
            assert self._plan is not None
            self.strategy.placement.remote.variables.place(self.store.global_step)
            for optimizer in self._plan.optimizers:
                give_to_servers(optimizer)
        return spec

    def step(self, features: Any, labels: Any) -> Any:
        """Makes one update, and returns what hooks may fetch."""
        with step_mode(StepMode.MEAN):
            if self._plan is None or not self.store.is_complete(self.mode):
                self._plan = self._find_plan(features, labels)
            if any(is_uninitialized(one) for one in self.store.made_in(self.mode)):
                return {}  # the step is traced again, with the variables that it has made
            return self._train(self._plan, features, labels)

    def _find_plan(self, features: Any, labels: Any) -> _Plan:
        """Calls the model function once to see what it makes; what it assigns is dropped."""
        outer = current_scope()
        assert outer is not None
        plans: list[_Plan] = []

        def plan(spec: EstimatorSpec) -> None:
            ops = as_train_ops(spec.train_op, spec.loss)
            own = self._trainable(scope)
            variables = [own if op.variables is None else list(op.variables) for op in ops]
            plans.append(_Plan(variables, _by_loss(ops), [op.optimizer for op in ops]))
            _build(ops, plans[0], self.strategy)

        with Collector(), ReplicaScope(outer.get_current_value) as scope:
            self.call(features, labels, plan)
        return plans[0]

    def _trainable(self, scope: ReplicaScope) -> list[Any]:
        """The variables that the model function has made or uses, as far as they are trainable."""
        made = self.store.made_in(self.mode)
        known = {id(variable) for variable in made}
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
        return _distinct(variable for variable in [*made, *used] if variable.trainable)

    def _train(self, plan: _Plan, features: Any, labels: Any) -> Any:
        outer = current_scope()
        assert outer is not None
        grads: dict[int, list[Any]] = {}
        for group in plan.losses[1:]:
            with Collector(), ReplicaScope(outer.get_current_value):
                grads |= self._gradients(plan, group, features, labels)[0]
        kept, ops, values = self._gradients(plan, plan.losses[0], features, labels)
        grads |= kept
        for index, op in enumerate(ops):
            pairs = [
                (grad, variable)
                for grad, variable in zip(grads[index], plan.variables[index], strict=True)
                if grad is not None
            ]
            if not pairs:
                raise _no_gradients(op, plan.variables[index])
            op.optimizer.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        self.store.global_step.assign_add(1)  # steps of others count, too
        values = reported(values)
        summary.scalar("loss", values["loss"])
        return values

    def _gradients(
        self, plan: _Plan, group: list[int], features: Any, labels: Any
    ) -> tuple[dict[int, list[Any]], list[Minimize], Any]:
        """The gradients of the updates of one loss, and what else the call has given."""
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


def _is_of_metric(home: Any) -> bool:
    return home.kind is VariableKind.ON_READ and home.aggregation.name == "SUM"


def _distinct(variables: Any) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _by_loss(ops: list[Minimize]) -> list[list[int]]:
    """Updates of one loss together; an optimizer that scales its loss has a loss of its own."""
    groups: dict[tuple[int, Any], list[int]] = {}
    for index, op in enumerate(ops):
        scales = hasattr(op.optimizer, "inner_optimizer") or op.optimizer.loss_scale_factor
        groups.setdefault((id(op.loss), id(op.optimizer) if scales else None), []).append(index)
    return list(groups.values())


def _build(ops: list[Minimize], plan: _Plan, strategy: Any) -> None:
    """Makes what the optimizers keep, within the call of the model function that made them."""
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
            expected="a loss that the model function computes from variables that can be trained.",
            fix="compute the loss from the output of a layer, or name other variables in var_list.",
        )
    )

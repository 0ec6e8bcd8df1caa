"""Keras classes and functions of parameter servers, used by `stratagem.keras`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import keras

from stratagem import contexts as stack
from stratagem.errors import explain
from stratagem.execution.replica_context import ReplicaContext
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.keras.numerics.optimizer import apply_with_rows
from stratagem.keras.private import clip_gradients, count_update, filter_empty_gradients
from stratagem.keras.training.datasets import DatasetCreator
from stratagem.keras.variables.requests import VariableRequest, current_annotations
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.client.variable_client import OptimizerScalar
from stratagem.parameter_server.keras.fit import RemotePredictFunction, RemoteTrainOrTestFunction
from stratagem.parameter_server.keras.keyed_variable import KeyedVariable
from stratagem.parameter_server.keras.optimizer import (
    check_known,
    clips,
    create_slot,
    give_to_servers,
    name_on_servers,
    note_built,
    rows_that_are_there,
    scalars_of,
    send,
    send_assigned,
    send_gradients,
)
from stratagem.parameter_server.keras.variable import (
    ParameterServerVariable,
    ShardedParameterServerVariable,
    class_of_slot,
)
from stratagem.parameter_server.keras.worker_data import WorkerData
from stratagem.parameter_server.server.updates import stored_name
from stratagem.variables.distributed import IndexedSlices, is_indexed_slices
from stratagem.variables.store import is_remote

if TYPE_CHECKING:
    import jax

    from stratagem.strategies.placement import PlacementRules
    from stratagem.strategies.strategy import Strategy

# Optimizer updates of models with both remote and local variables.


def apply_in_parts(
    apply: Callable[[Any, list[Any], Any], Any],
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[Any],
    context: ReplicaContext,
) -> None:
    """Applies gradients in a replica function: remote variables on the servers, others here.

    `apply` is that method of the optimizer's class; `grads` are summed over replicas. Raises a
    NotImplementedError if the optimizer needs whole tables.
    """
    _require_rows_suffice(optimizer)
    scope = current_scope()
    assert scope is not None
    check_known(optimizer, variables)
    grads, variables = filter_empty_gradients(optimizer, grads, variables)
    grads = _final(optimizer, grads)
    pairs = list(zip(grads, variables, strict=True))
    remote = [pair for pair in pairs if is_remote(pair[1])]
    own = [pair for pair in pairs if not is_remote(pair[1])]
    if remote:
        _send(optimizer, remote, scope.outermost)
    with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
        if not own:
            count_update(optimizer)
            return
        variables = [variable for _, variable in own]
        apply_with_rows(apply, optimizer, _scaled(optimizer, [grad for grad, _ in own]), variables)


def _require_rows_suffice(optimizer: keras.optimizers.Optimizer) -> None:
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not (is_scaling or optimizer.use_ema or optimizer.gradient_accumulation_steps):
        return
    raise NotImplementedError(
        explain(
            f"{optimizer.name} uses averaged variables (EMA), gradient accumulation or dynamic "
            "loss scaling, but some of its variables are on parameter servers.",
            expected="use_ema=False, no gradient_accumulation_steps and no LossScaleOptimizer: "
            "servers update only the rows that have gradients.",
            fix="omit these, or choose another place for the tables.",
            code="SG609",
        )
    )


def _final(optimizer: keras.optimizers.Optimizer, grads: list[Any]) -> list[Any]:
    """Unscales gradients and clips them by their global norm."""
    scale = optimizer.loss_scale_factor
    if scale:
        grads = [_with_values(grad, lambda value: value / scale) for grad in grads]
    if not clips(optimizer):
        return grads
    # Repeated ids count once in the norm, with the sum of their gradients.
    grads = [grad.combined() if is_indexed_slices(grad) else grad for grad in grads]
    values = [grad.values if is_indexed_slices(grad) else grad for grad in grads]
    clipped = iter(clip_gradients(optimizer, values))
    return [_with_values(grad, lambda _: next(clipped)) for grad in grads]


def _scaled(optimizer: keras.optimizers.Optimizer, grads: list[Any]) -> list[Any]:
    """Multiplies by the loss scale, since Keras divides again; clipping twice is harmless."""
    scale = optimizer.loss_scale_factor
    return [_with_values(grad, lambda value: value * scale) for grad in grads] if scale else grads


def _with_values(grad: jax.Array | IndexedSlices, change: Callable[[Any], Any]) -> Any:
    if not isinstance(grad, IndexedSlices):
        return change(grad)
    return IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)


def _send(
    optimizer: keras.optimizers.Optimizer, pairs: list[tuple[Any, Any]], scope: ReplicaScope
) -> None:
    """Sends gradients to the servers, along with the optimizer's scalars."""
    scope.prepare(functools.partial(give_to_servers, optimizer))
    name = name_on_servers(optimizer, pairs[0][1].variable_client)
    for own_name, scalar in scalars_of(optimizer).items():
        scope.send(OptimizerScalar(stored_name(name, own_name)), scalar.own_value())
    variables = [variable for _, variable in pairs]
    send_assigned(variables, optimizer, scope)
    for grad, variable in pairs:
        if is_indexed_slices(grad) and variable.has_rows:
            grad = rows_that_are_there(grad, variable)
        send(grad, variable, name, scope)
    slots = [one for one in optimizer.variables if is_remote(one)]
    scope.leave_to_servers([*variables, *slots])


class ServerKeras:
    """`placement.remote.keras`: what `stratagem.keras` asks of a strategy with remote state.

    The class of a new variable, slots, updates, the step functions of `fit`, and data that workers
    read. `keras` does not import parameter servers.
    """

    create_slot = staticmethod(create_slot)
    note_built = staticmethod(note_built)
    send_gradients = staticmethod(send_gradients)
    apply_in_parts = staticmethod(apply_in_parts)
    train_or_test_function = RemoteTrainOrTestFunction
    predict_function = RemotePredictFunction

    def variable_class(
        self, request: VariableRequest, strategy: Strategy
    ) -> type[DistributedVariable]:
        """Returns the class of a new variable."""
        if (kind := class_of_slot()) is not None:
            return kind
        placement = strategy.placement
        if current_annotations().keyed_table is not None:
            if not placement.is_remote:  # the rule that matches its path is in use
                cast("PlacementRules", placement).is_on_servers(request)
            return KeyedVariable
        if not placement.is_remote:
            # A counter or a learning rate stays in this process, which sends it to the servers.
            is_local = request.has_components or request.is_slot
            if is_local or not (request.trainable or request.shape):
                return DistributedVariable
            if not cast("PlacementRules", placement).is_on_servers(request):
                return DistributedVariable
        is_split = placement.remote.variables.splits(request.path, request.shape, request.dtype)
        return ShardedParameterServerVariable if is_split else ParameterServerVariable

    def worker_data(
        self,
        strategy: Strategy,
        creator: DatasetCreator,
        name: str,
        steps: object,
        *,
        is_training: bool,
    ) -> WorkerData:
        """Returns data created by workers; a synchronous training step takes a batch of each."""
        adds_up = is_training and strategy.placement.remote.is_synchronous
        return WorkerData(strategy, creator, name, steps, adds_up=adds_up)

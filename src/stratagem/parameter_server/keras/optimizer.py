"""Optimizers of remote variables: steps send gradients, and servers update."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import explain, invalid
from stratagem.execution.replica_context import ReplicaContext
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.execution.tracing.remote_state import Summand, SumOverWorkers
from stratagem.keras.private import (
    clip_gradients,
    decays,
    filter_empty_gradients,
    trainable_variables,
)
from stratagem.options import ReduceOp
from stratagem.parameter_server.client.variable_client import (
    Assigned,
    Gradient,
    IsFinite,
    OptimizerScalar,
    RowGradient,
    Scalar,
    VariableClient,
    VariableOnWorkerError,
)
from stratagem.parameter_server.keras.update_rule import KerasUpdate, other_shapes, scalar_names
from stratagem.parameter_server.keras.variable import (
    KeyedVariable,
    ParameterServerVariable,
    making_slot,
    whole_gradient,
)
from stratagem.parameter_server.server.shards import stored_name
from stratagem.strategies.strategy import Strategy
from stratagem.variables.distributed import IndexedSlices, is_indexed_slices
from stratagem.variables.layouts import is_keyed, is_remote

_NAME = "_stratagem_name"
_UNDECAYED = "_stratagem_undecayed"

_built: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_given: weakref.WeakSet[Any] = weakref.WeakSet()
_num_slots: weakref.WeakKeyDictionary[Any, Counter[tuple[int, str]]] = weakref.WeakKeyDictionary()


def create_slot(
    optimizer: keras.optimizers.Optimizer,
    reference: keras.Variable,
    name: str | None,
    create: Callable[[], Any],
) -> Any:
    """Creates the slot of a remote variable, `reference`, on that variable's server."""
    client = reference.variable_client
    full_name = stored_name(name_on_servers(optimizer, client), name or "var")
    counts = _num_slots.setdefault(optimizer, Counter())
    counts[id(reference), full_name] += 1
    number = counts[id(reference), full_name]
    own_name = full_name if number == 1 else f"{full_name}_{number}"

    def name_there() -> str:  # A step may create both; the variable must be placed first.
        client.place(reference)
        return f"{reference.place.name}:{own_name}"

    with making_slot(name_there, KeyedVariable if is_keyed(reference) else None):
        slot = create()
    slot.made_for(functools.partial(_give_late, weakref.ref(optimizer)))
    return slot


def _give_late(optimizer: weakref.ref[Any]) -> None:
    """Gives the servers an optimizer whose slots are read before its first use."""
    if (alive := optimizer()) is not None:
        give_to_servers(alive)


def name_on_servers(optimizer: keras.optimizers.Optimizer, variable_client: VariableClient) -> str:
    """Returns an optimizer's name on the servers, which is pickled with the optimizer.

    An optimizer created by a worker gets its name here.
    """
    optimizer = updating(optimizer)
    name = vars(optimizer).get(_NAME)
    if name is None:
        name = variable_client.name_optimizer(optimizer)
        object.__setattr__(optimizer, _NAME, name)
    return name


def share_name(
    optimizer: keras.optimizers.Optimizer,
    first: keras.optimizers.Optimizer,
    variable_client: VariableClient,
) -> None:
    """Makes an unbuilt optimizer share the server-side state of an equal one, `first`.

    The servers store the state as long as `first` exists.
    """
    object.__setattr__(optimizer, _NAME, name_on_servers(first, variable_client))


def note_built(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> None:
    """Records that a step on this worker built an optimizer, so that the coordinator does too.

    Raises a VariableOnWorkerError for a LossScaleOptimizer, whose scale all workers share.
    """
    may_create = strategy.placement.remote.variables.creates_variables
    if updating(optimizer) is not optimizer and not may_create:
        raise VariableOnWorkerError(
            explain(
                f"{optimizer.name} was built in a function on a worker.",
                expected="a LossScaleOptimizer that the coordinator has built: all workers share "
                "its scale.",
                fix="call optimizer.build(variables) before you schedule the function.",
                code="SG608",
            )
        )
    _built.setdefault(strategy, []).append(optimizer)


def take_built(strategy: Strategy) -> list[Any]:
    """Returns and clears the optimizers recorded by `note_built` on this worker."""
    return _built.pop(strategy, [])


def give_to_servers(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives the servers a built optimizer of remote variables, unless they have it.

    Raises a NotImplementedError if servers cannot run it, a ServerError if they have another one of
    that name.
    """
    trained = trainable_variables(optimizer)
    variables: list[Any] = [one for one in trained if is_remote(one)]
    optimizer = updating(optimizer)
    if not variables or _is_with_servers(optimizer):
        return
    variable_client = variables[0].variable_client
    _check_for_servers(optimizer, variable_client)
    for variable in variables:
        variable_client.place(variable)
    scalars = scalars_of(optimizer)
    sends_scalars = not variables[0].distribute_strategy.placement.is_remote
    start = {
        # Nadam's product counts as trainable, so that it is on the servers as a variable, too.
        name: np.asarray(one.value if sends_scalars else variable_client.read(one))
        for name, one in scalars.items()
    }
    own_name = name_on_servers(optimizer, variable_client)
    undecayed = _names_of_undecayed(optimizer, variables)
    rule = KerasUpdate(
        optimizer,
        undecayed,
        start,
        is_told_scalars=sends_scalars,
        constraints=constraints_of(variables),
    )
    variable_client.set_rule(rule, variables, own_name)
    # Only some servers update these variables: ask one that does.
    server = variable_client.placement_of(variables[0]).servers[0]
    for name, variable in scalars.items():
        if not sends_scalars:
            variable.place = Scalar(stored_name(own_name, name), server)
    _given.add(optimizer)
    variable_client.secure()


def updating(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the optimizer that updates variables: the inner one of a LossScaleOptimizer."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaling else optimizer


def constraints_of(variables: list[Any]) -> dict[str, Any]:
    """Returns the constraints of placed variables, by name on the servers."""
    for variable in variables:
        variable.check_constraint()
    return {one.place.name: one.constraint for one in variables if one.constraint is not None}


def _check_for_servers(optimizer: Any, variable_client: Any) -> None:
    sized = [one.name for one in scalars_of(optimizer).values() if one.shape]
    if sized:  # Servers would raise too, but with a less helpful error.
        raise other_shapes(type(optimizer), sized)
    mode = variable_client.mode
    if mode.num_needed > 1 and clips(optimizer):
        raise NotImplementedError(
            explain(
                f"{optimizer.name} clips gradients, but servers sum those of all workers first.",
                expected="an optimizer without clipping under a synchronous "
                "ParameterServerStrategy: no server has the whole gradient.",
                fix="omit clipnorm, global_clipnorm and clipvalue, or omit synchronous=True.",
                code="SG609",
            )
        )


def _names_of_undecayed(optimizer: Any, variables: list[Any]) -> list[str]:
    recorded = {id(one) for one in vars(optimizer).get(_UNDECAYED, ())}
    return [
        one.place.name for one in variables if id(one) in recorded or not decays(optimizer, one)
    ]


def scalars_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns a built optimizer's scalar variables by their names on the servers."""
    scalars = [one for one in optimizer.variables if not _is_slot(one)]
    return dict(zip(scalar_names(scalars), scalars, strict=True))


def _is_slot(variable: keras.Variable) -> bool:
    is_on_servers = is_remote(variable)
    return variable.is_slot if is_on_servers else getattr(variable, "slot_of", None) is not None


def note_undecayed(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> None:
    """Records the variables excluded from weight decay before an unbuilt optimizer is pickled.

    Keras identifies them by `id`, which differs in another process.
    """
    if optimizer.weight_decay is not None:
        left_out = [one for one in strategy.variables.live() if not decays(optimizer, one)]
        object.__setattr__(optimizer, _UNDECAYED, left_out)


def _is_with_servers(optimizer: keras.optimizers.Optimizer) -> bool:
    places = (getattr(one, "place", None) for one in optimizer.variables)
    return optimizer in _given or any(isinstance(place, Scalar) for place in places)


def send_gradients(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[Any],
    context: ReplicaContext,
    *,
    are_reduced: bool,
) -> None:
    """Sends the gradients of a step to the servers: summed over its replicas, then clipped.

    `grads` are weighted for the sum; `are_reduced` means that they are already the same on all
    replicas. Raises a ValueError for variables that the optimizer was not built for, and if all
    gradients are None.
    """
    scope = current_scope()
    if scope is None or not grads:
        return
    check_known(optimizer, variables)
    scope.outermost.prepare(functools.partial(give_to_servers, optimizer))
    grads, variables = filter_empty_gradients(optimizer, grads, variables)
    if context.num_replicas_in_sync > 1 and not are_reduced:
        grads = _summed(grads, context)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        grads = _unscaled(optimizer, grads, variables[0].variable_client, scope.outermost)
        optimizer = optimizer.inner_optimizer
    # These change rows without a lookup, so that servers need gradients of whole tables.
    has_whole = bool(optimizer.use_ema or optimizer.gradient_accumulation_steps)
    grads = [
        grad.to_dense() if is_indexed_slices(grad) and (has_whole or not one.has_rows) else grad
        for grad, one in zip(grads, variables, strict=True)
    ]
    grads = final_gradients(optimizer, grads, variables)
    send_all(optimizer, grads, variables, scope.outermost)


def send_all(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[Any],
    scope: ReplicaScope,
) -> None:
    """Sends gradients to the servers, with the optimizer's scalars if this process has them.

    `scope` is that of the whole replica function.
    """
    name = name_on_servers(optimizer, variables[0].variable_client)
    if not variables[0].distribute_strategy.placement.is_remote:
        for own_name, scalar in scalars_of(optimizer).items():
            scope.send(OptimizerScalar(stored_name(name, own_name)), scalar.own_value())
    _send_assigned(variables, optimizer, scope)
    for grad, variable in zip(grads, variables, strict=True):
        _send(grad, variable, name, scope)
    scope.leave_to_servers([*variables, *filter(is_remote, optimizer.variables)])


def final_gradients(
    optimizer: keras.optimizers.Optimizer, grads: list[Any], variables: list[Any]
) -> list[Any]:
    """Returns gradients of rows that are there, unscaled, and clipped, all together by their norm.

    `variables` may be on servers, or here.
    """
    is_clipping, scale = clips(optimizer), optimizer.loss_scale_factor
    found: list[Any] = []
    for grad, variable in zip(grads, variables, strict=True):
        if is_indexed_slices(grad) and is_clipping:
            # Repeated ids count once in the norm, with the sum of their gradients.
            grad = grad.combined()
        if is_indexed_slices(grad) and is_remote(variable) and variable.has_rows:
            grad = rows_that_are_there(grad, variable)
        found.append(with_values(grad, lambda value: value / scale) if scale else grad)
    if not is_clipping:
        return found
    clipped = iter(clip_gradients(optimizer, [_values(grad) for grad in found]))
    return [with_values(grad, lambda _: next(clipped)) for grad in found]


def with_values(grad: jax.Array | IndexedSlices, change: Callable[[Any], Any]) -> Any:
    """Returns a gradient with other numbers."""
    if not isinstance(grad, IndexedSlices):
        return change(grad)
    return IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)


def _values(grad: jax.Array | IndexedSlices) -> Any:
    return grad.values if isinstance(grad, IndexedSlices) else grad


def _unscaled(
    optimizer: Any, grads: list[Any], client: VariableClient, scope: ReplicaScope
) -> list[Any]:
    """Returns gradients without their dynamic scale, and adapts it; see LossScaleOptimizer.

    The servers make no update if a gradient is infinite or no number, of any synchronous worker.
    """
    counter, scale = optimizer.step_counter.value, optimizer.dynamic_scale.value
    grads = [with_values(grad, lambda value: value / scale) for grad in grads]
    is_finite = optimizer.check_finite([_values(grad) for grad in grads])
    if client.mode.num_needed > 1 and scope.receive is not None:
        place, num_infinite = scope.receive(SumOverWorkers(None, (), jnp.dtype("float32")))
        scope.send(Summand(place), 1 - is_finite.astype("float32"))
        is_finite = num_infinite == 0
    scope.send(IsFinite(name_on_servers(optimizer, client)), is_finite)
    is_grown = counter == optimizer.dynamic_growth_steps - 1
    grown = jnp.where(is_grown, scale * 2, scale)
    optimizer.step_counter.assign(jnp.where(is_finite & ~is_grown, counter + 1, 0))
    optimizer.dynamic_scale.assign(jnp.where(is_finite, grown, scale * 0.5))
    return grads


def _send_assigned(
    variables: list[Any], optimizer: keras.optimizers.Optimizer, scope: ReplicaScope
) -> None:
    """Sends what the step has assigned so far to trained variables, and to the optimizer's own.

    Servers then update the assigned values, as one device does.
    """
    mode = variables[0].variable_client.mode
    for variable in (*variables, *optimizer.variables):
        if id(variable) not in scope.writes or not is_remote(variable):
            continue
        value = scope.written_value(variable)
        # Workers that take turns must not undo each other's updates.
        is_added = bool(variable.shape) and id(variable) in scope.added_to and not mode.num_needed
        if is_added:
            value -= jnp.asarray(scope.unwritten_value(variable), value.dtype)
        name = name_on_servers(optimizer, variables[0].variable_client)
        scope.send(Assigned(variable, name, is_added=is_added), value)


def _send(
    grad: jax.Array | IndexedSlices,
    variable: ParameterServerVariable,
    optimizer: str,
    scope: ReplicaScope,
) -> None:
    """Sends a gradient, dense or rows with ids in range, to the servers.

    `optimizer` is its name on the servers; `scope` is that of the whole replica function.
    """
    if isinstance(grad, IndexedSlices) and variable.has_rows:
        scope.send(RowGradient(variable, is_ids=True, optimizer=optimizer), grad.indices)
        scope.send(RowGradient(variable, is_ids=False, optimizer=optimizer), grad.values)
        return
    if is_keyed(variable):
        raise whole_gradient(variable)
    whole = grad.to_dense() if isinstance(grad, IndexedSlices) else grad
    scope.send(Gradient(variable, optimizer), whole)


def check_known(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    """Raises a ValueError for variables that an optimizer was not built for."""
    known = {id(variable) for variable in trainable_variables(optimizer)}
    unknown = [variable.path for variable in variables if id(variable) not in known]
    if unknown:
        raise invalid(
            f"{optimizer.name} received gradients of {unknown}, but was not built for them.",
            expected="variables that the optimizer was built for.",
            fix="build it for all variables: optimizer.build(model.trainable_variables).",
        )


def _summed(grads: list[Any], context: ReplicaContext) -> list[Any]:
    whole = [grad for grad in grads if not is_indexed_slices(grad)]
    summed = iter(context.communicator.all_reduce_many(ReduceOp.SUM, whole))
    return [
        context.communicator.all_reduce_slices(ReduceOp.SUM, grad)
        if is_indexed_slices(grad)
        else next(summed)
        for grad in grads
    ]


def rows_that_are_there(slices: IndexedSlices, table: keras.Variable) -> IndexedSlices:
    """Normalizes ids: those below 0 count from the end, those past the end are dropped.

    Places of keys are normalized later, where the number of keys is known.
    """
    if is_keyed(table):
        return slices
    num_rows = table.shape[0]
    ids = jnp.asarray(slices.indices).astype(jnp.int32)
    ids = jnp.where(ids < 0, ids + num_rows, ids)
    is_there = (ids >= 0) & (ids < num_rows)
    # Ids out of range become a zero gradient of a row that is updated anyway.
    any_id = jnp.min(jnp.where(is_there, ids, num_rows - 1), initial=num_rows - 1)
    is_row = is_there.reshape(-1, *[1] * (slices.values.ndim - 1))
    values = jnp.where(is_row, slices.values, jnp.zeros((), slices.values.dtype))
    return IndexedSlices(values, jnp.where(is_there, ids, any_id), slices.dense_shape)


def clips(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns True if gradients are clipped before they are sent to servers."""
    if optimizer.gradient_accumulation_steps:  # The servers clip the mean.
        return False
    limits = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    return any(limit is not None for limit in limits)

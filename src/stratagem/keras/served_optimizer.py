"""Optimizers of variables on parameter servers: a step sends gradients, the servers update.

`add_variable_from_reference` of `keras.optimizers.Optimizer` is replaced (Keras 3.12 to 3.15): what
an optimizer keeps for a served variable is made where that variable is.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from typing import Any

import keras

from stratagem.context import ReplicaContext
from stratagem.execution import ReplicaScope
from stratagem.keras.private import clip_gradients, trainable_variables
from stratagem.keras.served_update import KerasUpdate, scalar_names
from stratagem.keras.served_variable import ServedVariable, making_slot
from stratagem.messages import explain
from stratagem.options import ReduceOp
from stratagem.strategies import Gradient, RowGradient, Scalar, Stored
from stratagem.values import IndexedSlices, is_indexed_slices

__all__ = [
    "give_to_servers",
    "install",
    "is_served",
    "note_built",
    "send_gradients",
    "take_built",
]

_built: list[Any] = []
_num_slots: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Makes slots of served variables where these are. Done once, on import."""
    original = keras.optimizers.Optimizer.add_variable_from_reference

    def add(self: Any, reference_variable: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(reference_variable, ServedVariable):
            return original(self, reference_variable, name, *args, **kwargs)
        serving = reference_variable.serving
        serving.place(reference_variable)
        slot = f"{reference_variable.place.name}:{name or 'var'}"
        counts = _num_slots.setdefault(self, Counter())
        counts[slot] += 1
        number = counts[slot]
        with making_slot(slot if number == 1 else f"{slot}_{number}"):
            return original(self, reference_variable, name, *args, **kwargs)

    keras.optimizers.Optimizer.add_variable_from_reference = add


def is_served(variables: list[Any]) -> bool:
    """Tells whether variables are on parameter servers."""
    return any(isinstance(variable, ServedVariable) for variable in variables)


def note_built(optimizer: Any) -> None:
    """Notes that a step has built an optimizer: the coordinator builds its own likewise."""
    _built.append(optimizer)


def take_built() -> list[Any]:
    """Returns the optimizers that were noted since this was last called."""
    taken = list(_built)
    del _built[: len(taken)]
    return taken


def give_to_servers(optimizer: Any) -> None:
    """Gives the servers an optimizer that was built, unless they have it.

    Args:
        optimizer: of Keras, built for served variables.

    Raises:
        NotImplementedError: an optimizer that servers cannot run.
        ValueError: the servers have another one.
    """
    variables = trainable_variables(optimizer)
    if not is_served(variables) or isinstance(optimizer.iterations.place, Scalar):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            explain(
                f"{optimizer.name} is to scale losses by what it learns from all gradients.",
                expected="an optimizer without dynamic loss scaling under a "
                "ParameterServerStrategy: no server sees all gradients.",
                fix="use bfloat16, or loss_scale_factor= for a constant scale.",
            )
        )
    serving = variables[0].serving
    if serving.mode.num_needed > 1 and _clips(optimizer):
        raise NotImplementedError(
            explain(
                f"{optimizer.name} is to clip gradients that workers add up on the servers.",
                expected="an optimizer without clipping under a synchronous "
                "ParameterServerStrategy: no server sees the whole gradient.",
                fix="leave clipnorm, global_clipnorm and clipvalue out, or synchronous=True.",
            )
        )
    serving.set_rule(KerasUpdate(optimizer), variables)
    kept_once = [one for one in optimizer.variables if not isinstance(one.place, Stored)]
    for variable, name in zip(kept_once, scalar_names(kept_once), strict=True):
        variable.place = Scalar(name)
    serving.secure()


def send_gradients(
    optimizer: Any,
    grads: list[Any],
    variables: list[Any],
    context: ReplicaContext,
    scope: ReplicaScope,
) -> None:
    """Hands the gradients of a step to the servers: summed over its replicas, then clipped.

    Args:
        optimizer: the optimizer, built.
        grads: of this replica.
        variables: their variables.
        context: of the replica.
        scope: of the replica function.
    """
    scope.outermost.prepare(functools.partial(give_to_servers, optimizer))
    pairs = [pair for pair in zip(grads, variables, strict=True) if pair[0] is not None]
    summed: list[Any] = []
    rows: dict[int, IndexedSlices] = {}
    for place, (grad, variable) in enumerate(pairs):
        slices = grad if is_indexed_slices(grad) else scope.rows_of(grad)
        if variable.has_rows and slices is not None:
            if context.num_replicas_in_sync > 1:
                slices = context.communicator.all_reduce_slices(ReduceOp.SUM, slices)
            # Of ids that come twice the norm is that of the sum.
            rows[place] = slices.combined() if _clips(optimizer) else slices
            summed.append(rows[place].values)
        else:
            dense = grad.to_dense() if is_indexed_slices(grad) else grad
            summed.append(dense)
    whole = [place for place in range(len(pairs)) if place not in rows]
    if context.num_replicas_in_sync > 1:
        reduced = context.communicator.all_reduce_many(ReduceOp.SUM, [summed[p] for p in whole])
        for place, value in zip(whole, reduced, strict=True):
            summed[place] = value
    for place, value in enumerate(clip_gradients(optimizer, summed)):
        variable = pairs[place][1]
        if place in rows:
            scope.outermost.send(RowGradient(variable, is_ids=True), rows[place].indices)
            scope.outermost.send(RowGradient(variable, is_ids=False), value)
        else:
            scope.outermost.send(Gradient(variable), value)


def _clips(optimizer: Any) -> bool:
    limits = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    return any(limit is not None for limit in limits)

"""value_and_grad over Keras variables: what stands for GradientTape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.execution.functionalize import ReplicaScope, current_scope
from stratagem.messages import explain

__all__ = ["value_and_grad"]


def value_and_grad(fn: Callable[[], Any], variables: Any, *, has_aux: bool = False) -> Any:
    """Calls a function and returns its value and the gradients of it. Call anywhere.

    In replica context the gradients are those of this replica's own value; an optimizer's
    `apply_gradients` sums them over replicas.

    Args:
        fn: called once without arguments; returns a scalar, or with `has_aux` a pair of a scalar
            and any pytree. What it assigns to variables is kept.
        variables: pytree of Keras variables to differentiate by.
        has_aux: whether `fn` returns a pair.

    Returns:
        `(value, gradients)`: gradients in the structure of `variables`, each of its variable's
        shape and dtype, None for a variable that `fn` did not read or whose dtype has no gradient.
        With `has_aux`, value is the pair that `fn` returned.

    Raises:
        ValueError: the value is not a scalar.

    Example:
        >>> v = sg.Variable(3.0)
        >>> sg.value_and_grad(lambda: v * v, [v])
        (Array(9., dtype=float32), [Array(6., dtype=float32)])

    Source: JAX, jax.value_and_grad; TF 2.21 backprop.py, GradientTape.gradient.
    """
    flat, structure = jax.tree.flatten(variables)
    outer = current_scope()
    differentiable = [v for v in flat if jnp.issubdtype(jnp.dtype(v.dtype), jnp.inexact)]
    values = [_current_value(variable, outer) for variable in differentiable]
    written: list[Any] = []
    read_ids: set[int] = set()

    def functional(inputs: list[Any]) -> tuple[Any, Any]:
        scope = ReplicaScope(outer.get_current_value if outer is not None else lambda _: None)
        for variable, value in zip(differentiable, inputs, strict=True):
            scope.set_value(variable, value)
        with scope:
            result = fn()
        value, aux = result if has_aux else (result, None)
        _require_scalar(value)
        read_ids.update(scope.read_ids)
        written[:] = [(v, key in scope.unproven) for key, v in scope.writes.items()]
        updates = [scope.written_value(variable) for variable, _ in written]
        return jnp.asarray(value), (aux, updates)

    (value, (aux, updates)), grads = jax.value_and_grad(functional, has_aux=True)(values)
    _keep_updates(written, updates, outer)
    by_id = {
        id(v): grad for v, grad in zip(differentiable, grads, strict=True) if id(v) in read_ids
    }
    gradients = jax.tree.unflatten(structure, [by_id.get(id(variable)) for variable in flat])
    return ((value, aux) if has_aux else value), gradients


def _current_value(variable: Any, scope: ReplicaScope | None) -> Any:
    value = scope.get_current_value(variable) if scope is not None else None
    return jnp.asarray(variable.value if value is None else value)


def _keep_updates(written: list[Any], updates: list[Any], outer: ReplicaScope | None) -> None:
    for (variable, is_unproven), update in zip(written, updates, strict=True):
        if outer is None:
            variable.assign(update)
            continue
        outer.add_update((variable, update))
        if is_unproven:
            outer.mark_unproven(variable)


def _require_scalar(value: Any) -> None:
    shape = jnp.shape(value)
    if shape != ():
        raise ValueError(
            explain(
                f"The function given to value_and_grad returned a value of shape {shape}.",
                expected="a scalar.",
                fix="reduce it, for example with sg.compute_average_loss, or return "
                "(scalar, rest) and pass has_aux=True.",
            )
        )

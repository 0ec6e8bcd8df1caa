"""Initial values of variables, known outside every trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer

from stratagem.devices.shards import creating_on_host
from stratagem.messages import explain

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def as_initializer(value: object, dtype: DTypeLike | None) -> tuple[Any, Any, Any]:
    """Turns an initial value into what Keras can also call later, outside a trace.

    Args:
        value: array, number or variable.
        dtype: dtype; None for that of the value.

    Returns:
        The initializer, the shape and the dtype.

    Raises:
        ValueError: a traced value.
    """
    if isinstance(value, keras.Variable):
        value = value.value
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        raise ValueError(
            explain(
                "A variable was given an initial value that a compiled function computes.",
                expected="a value that is known when the variable is created, or an initializer.",
                fix="create the variable with an initializer, and assign the value.",
            )
        )
    # Not as a part of the program that is being traced, nor where it may be too large for a device.
    with jax.ensure_compile_time_eval(), creating_on_host(not isinstance(value, jax.Array)):
        array = jnp.asarray(keras.ops.convert_to_tensor(value, dtype=dtype))
        is_given = array is value

    def initializer(shape: Sequence[int], dtype: DTypeLike | None = None) -> Any:
        # A copy of what the caller has, too: a step donates the buffers of its variables.
        own = jnp.array(array, copy=True) if is_given else array
        # The dtype of a variable is its own: a number's would give way to other operands'.
        return jax.lax.convert_element_type(own, dtype or array.dtype)

    return initializer, array.shape, keras.backend.standardize_dtype(array.dtype)


def draws_same_again(initializer: object) -> bool:
    """Returns True for an initializer of Keras with a seed of its own."""
    kind = type(initializer)
    is_of_keras = getattr(keras.initializers, kind.__name__, None) is kind
    return is_of_keras and isinstance(getattr(initializer, "seed", None), int)

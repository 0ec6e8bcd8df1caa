"""minimize: optimizer updates of a model function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from stratagem.messages import explain


@dataclasses.dataclass(frozen=True, eq=False)
class Minimize:
    """Update of some variables by an optimizer. Created by `sg.estimator.minimize`.

    Args:
        optimizer: the Keras optimizer.
        loss: the loss, a scalar.
        variables: the variables to update; None for all trainable ones.

    Example:
        >>> kernel = sg.Variable(1.0)
        >>> op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss=0.5, var_list=[kernel])
        >>> isinstance(op, sg.estimator.Minimize), op.variables[0] is kernel
        (True, True)

    Source: TF 2.21 training/optimizer.py, Optimizer.minimize.
    """

    optimizer: keras.optimizers.Optimizer
    loss: Any
    variables: tuple[Any, ...] | None


def minimize(optimizer: object, loss: object, var_list: Sequence[Any] | None = None) -> Minimize:
    """Creates the `train_op` of an `EstimatorSpec`, as `optimizer.minimize` did in TensorFlow 1.

    Nothing is computed here. The training step differentiates the model function, averages the
    gradients over replicas and applies them.

    Args:
        optimizer: a Keras optimizer, created in the model function.
        loss: a scalar that the model function computed, the mean over the examples; or a function
            without arguments that computes it, which is called immediately.
        var_list: the Keras variables to update; None for all trainable ones that the loss depends
            on.

    Returns:
        The update.

    Raises:
        TypeError: if `optimizer` is not a Keras optimizer.
        ValueError: if `var_list` is empty.

    Example:
        >>> op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss=0.5)
        >>> op.loss, op.variables
        (0.5, None)

    Source: TF 2.21 training/optimizer.py, Optimizer.minimize.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            explain(
                f"minimize received optimizer={optimizer!r} of type {type(optimizer).__name__}.",
                expected="a Keras optimizer.",
                fix="pass keras.optimizers.SGD(0.1), for example.",
            )
        )
    variables = None if var_list is None else tuple(var_list)
    if variables is not None and not variables:
        raise ValueError(
            explain(
                "minimize received an empty var_list.",
                expected="variables to update.",
                fix="omit var_list to update all variables, or build the layers before listing "
                "their variables.",
            )
        )
    compute: Callable[[], Any] | None = loss if callable(loss) else None
    return Minimize(optimizer, loss if compute is None else compute(), variables)


def as_train_ops(train_op: object, loss: object) -> list[Minimize]:
    """Returns the `train_op` of an `EstimatorSpec` as a list of updates."""
    ops: list[Any] = list(train_op) if isinstance(train_op, list | tuple) else [train_op]
    return [op if isinstance(op, Minimize) else minimize(op, loss) for op in ops]

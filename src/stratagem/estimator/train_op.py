"""The updates of a model function: which optimizer makes which loss smaller, by which variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from stratagem.messages import explain

__all__ = ["Minimize", "as_train_ops", "minimize"]


@dataclasses.dataclass(frozen=True, eq=False)
class Minimize:
    """An update that a training step is to make. Made by `sg.estimator.minimize`.

    Args:
        optimizer: the Keras optimizer.
        loss: the loss, a scalar of the model function.
        variables: those to update; None for all that can be trained.
    """

    optimizer: keras.optimizers.Optimizer
    loss: Any
    variables: tuple[Any, ...] | None


def minimize(optimizer: Any, loss: Any, var_list: Sequence[Any] | None = None) -> Minimize:
    """Makes the `train_op` of an `EstimatorSpec`: what `optimizer.minimize` was in TensorFlow 1.

    Nothing is computed here: the step differentiates the model function by the variables, averages
    the gradients over replicas and applies them.

    Args:
        optimizer: a Keras optimizer, made in the model function.
        loss: the mean over the examples, a scalar that the model function has computed; or a
            function without arguments that computes it, which is called now.
        var_list: Keras variables to update; None for all trainable ones that the loss depends on.

    Returns:
        The update.

    Raises:
        TypeError: no Keras optimizer.
        ValueError: no variables.

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
                fix="leave var_list out for all, or build the layers before their variables are "
                "listed.",
            )
        )
    compute: Callable[[], Any] | None = loss if callable(loss) else None
    return Minimize(optimizer, loss if compute is None else compute(), variables)


def as_train_ops(train_op: Any, loss: Any) -> list[Minimize]:
    """Returns the updates of an `EstimatorSpec`.

    Args:
        train_op: a `Minimize` or a Keras optimizer, or a list of these.
        loss: of the spec, for optimizers.
    """
    given: list[Any] = list(train_op) if isinstance(train_op, list | tuple) else [train_op]
    return [op if isinstance(op, Minimize) else minimize(op, loss) for op in given]

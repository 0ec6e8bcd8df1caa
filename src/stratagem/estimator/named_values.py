"""Values of a model function that hooks can fetch by name."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any

from stratagem.messages import explain

__all__ = ["identity", "naming_values"]

_names: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "named_values", default=None
)


@contextlib.contextmanager
def naming_values() -> Generator[dict[str, Any]]:
    """Collects what `identity` is given in a `with` block.

    Yields:
        The values by name.
    """
    values: dict[str, Any] = {}
    token = _names.set(values)
    try:
        yield values
    finally:
        _names.reset(token)


def identity(value: Any, name: str) -> Any:
    """Names a value of a model function, so that hooks can fetch it.

    Of a scalar with a fraction hooks get the average over the replicas, by their true examples;
    of any other value that of the first replica.

    Args:
        value: an array.
        name: by which hooks fetch it; the later of two with one name counts.

    Returns:
        The value.

    Raises:
        ValueError: "loss" or "global_step", which are known without.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     norm = sg.estimator.identity(keras.ops.norm(features), name="norm")
        >>> hook = sg.estimator.LoggingTensorHook(["loss", "norm"], every_n_iter=100)

    Source: TF 2.21 array_ops.py, identity.
    """
    if name in ("loss", "global_step"):
        raise ValueError(
            explain(
                f"identity received name={name!r}.",
                expected="another name: this one stands for what the loop knows by itself.",
                fix="rename it.",
            )
        )
    values = _names.get()
    if values is not None:
        values[name] = value
    return value

"""Named values of a model function, which hooks can fetch."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any

from stratagem.errors import explain

_names: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "named_values", default=None
)


@contextlib.contextmanager
def naming_values() -> Generator[dict[str, Any]]:
    """Collects the values passed to `identity` inside the `with` block, by name."""
    values: dict[str, Any] = {}
    token = _names.set(values)
    try:
        yield values
    finally:
        _names.reset(token)


def identity(value: object, name: str) -> Any:
    """Names a value of a model function so that hooks can fetch it.

    A hook receives the example-weighted average over replicas for a floating-point scalar, and
    the first replica's value for anything else.

    Args:
        value: an array.
        name: the name to fetch it by. A later value replaces an earlier one of the same name.

    Returns:
        `value`, unchanged.

    Raises:
        ValueError: if `name` is "loss" or "global_step", which the loop defines.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     norm = sg.estimator.identity(keras.ops.norm(features), name="norm")
        >>> hook = sg.estimator.LoggingTensorHook(["loss", "norm"], every_n_iter=100)

    Source: TF 2.21 array_ops.py, identity.
    """
    if name in ("loss", "global_step"):
        raise ValueError(
            explain(
                f"identity received name={name!r}, which is reserved.",
                expected='any name except "loss" and "global_step": the training loop sets those.',
                fix="choose another name.",
            )
        )
    values = _names.get()
    if values is not None:
        values[name] = value
    return value

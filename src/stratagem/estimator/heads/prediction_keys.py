"""TensorFlow's names of predictions and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.messages import explain

__all__ = ["select"]


def select(
    available: Mapping[str, Callable[[], Any]], keys: Sequence[str] | None
) -> dict[str, Any]:
    """Computes the predictions that are asked for.

    Args:
        available: name to what computes it.
        keys: the names; None for all.

    Raises:
        ValueError: a name that is not available.
    """
    unknown = [key for key in keys or () if key not in available]
    if unknown:
        raise ValueError(
            explain(
                f"Prediction keys {unknown} are unknown.",
                expected=f"some of {list(available)}.",
                fix="correct the names, or leave keys out for all.",
            )
        )
    return {key: available[key]() for key in keys or available}

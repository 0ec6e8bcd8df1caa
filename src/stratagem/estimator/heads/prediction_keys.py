"""Selection of predictions by TensorFlow's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.messages import explain


def select(
    available: Mapping[str, Callable[[], Any]], keys: Sequence[str] | None
) -> dict[str, Any]:
    """Computes the requested predictions; None for all."""
    unknown = [key for key in keys or () if key not in available]
    if unknown:
        raise ValueError(
            explain(
                f"Prediction keys {unknown} are unknown.",
                expected=f"some of {list(available)}.",
                fix="correct the names, or omit keys for all predictions.",
            )
        )
    return {key: available[key]() for key in keys or available}

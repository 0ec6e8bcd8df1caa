"""What variables are annotated with where their creator cannot be told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

__all__ = ["annotated_variables", "current_annotations"]


class _Annotations(threading.local):
    current: tuple[str, str] | None = None


_annotations = _Annotations()


@contextlib.contextmanager
def annotated_variables(*, synchronization: str, aggregation: str) -> Generator[None]:
    """Annotates the variables that are created in a `with` block; `add_weight` cannot be told.

    Args:
        synchronization: one of Keras's strings.
        aggregation: one of Keras's strings.
    """
    previous, _annotations.current = _annotations.current, (synchronization, aggregation)
    try:
        yield
    finally:
        _annotations.current = previous


def current_annotations() -> tuple[str, str] | None:
    """Returns the synchronization and aggregation of variables created now, if they are set."""
    return _annotations.current

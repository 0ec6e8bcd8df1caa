"""What variables are annotated with where their creator cannot be told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

__all__ = [
    "annotated_variables",
    "current_annotations",
    "is_making_state_of_metric",
    "is_making_table",
    "making_slot_of",
    "making_state_of_metric",
    "making_table",
    "owner_of_new_slot",
]


class _Annotations(threading.local):
    current: tuple[str, str] | None = None
    is_table = False
    slot_of: Any = None
    is_of_metric = False


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


@contextlib.contextmanager
def making_table() -> Generator[None]:
    """Variables that are created in a `with` block are tables, of which rows are looked up."""
    _annotations.is_table, previous = True, _annotations.is_table
    try:
        yield
    finally:
        _annotations.is_table = previous


def is_making_table() -> bool:
    """Tells whether a variable that is created now is a table."""
    return _annotations.is_table


@contextlib.contextmanager
def making_slot_of(variable: Any) -> Generator[None]:
    """Variables that are created in a `with` block are what an optimizer keeps for another.

    Args:
        variable: that other one.
    """
    _annotations.slot_of, previous = variable, _annotations.slot_of
    try:
        yield
    finally:
        _annotations.slot_of = previous


def owner_of_new_slot() -> Any:
    """Returns the variable that one created now is a slot of; None for any other."""
    return _annotations.slot_of


@contextlib.contextmanager
def making_state_of_metric() -> Generator[None]:
    """Variables that are created in a `with` block are state of a metric."""
    previous, _annotations.is_of_metric = _annotations.is_of_metric, True
    try:
        yield
    finally:
        _annotations.is_of_metric = previous


def is_making_state_of_metric() -> bool:
    """True while the variables of a metric are created."""
    return _annotations.is_of_metric

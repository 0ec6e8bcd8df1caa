"""Thread-local annotations of new variables: synchronization, table, slot, worker-local."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


# Attribute of the variables of seed generators.
IS_SEED = "_stratagem_is_seed"


class _Annotations(threading.local):
    current: tuple[str, str] | None = None
    is_table = False
    keyed_table: Any = None
    slot_of: Any = None
    is_of_metric = False
    is_worker_local = False


_annotations: _Annotations = _Annotations()


@contextlib.contextmanager
def annotated_variables(*, synchronization: str, aggregation: str) -> Generator[None]:
    """Annotates the variables that are created in a `with` block, with Keras's strings.

    For code that cannot pass these arguments, such as calls of `add_weight`.
    """
    previous, _annotations.current = _annotations.current, (synchronization, aggregation)
    try:
        yield
    finally:
        _annotations.current = previous


def current_annotations() -> tuple[str, str] | None:
    """Returns the synchronization and aggregation of new variables; None if not set."""
    return _annotations.current


@contextlib.contextmanager
def making_table() -> Generator[None]:
    """Marks variables created in a `with` block as tables for lookups of rows."""
    _annotations.is_table, previous = True, _annotations.is_table
    try:
        yield
    finally:
        _annotations.is_table = previous


def is_making_table() -> bool:
    """True if a variable created now is a table."""
    return _annotations.is_table


@contextlib.contextmanager
def making_keyed_table(options: object) -> Generator[None]:
    """Makes variables created in a `with` block tables on parameter servers with rows by key.

    `options` are the `KeyedTableOptions` of `stratagem.parameter_server.keras`.
    """
    previous, _annotations.keyed_table = _annotations.keyed_table, options
    try:
        yield
    finally:
        _annotations.keyed_table = previous


def keyed_table_options() -> Any:
    """Returns the options of a keyed table created now; None for any other variable."""
    return _annotations.keyed_table


@contextlib.contextmanager
def making_slot_of(variable: keras.Variable) -> Generator[None]:
    """Marks variables created in a `with` block as optimizer slots of `variable`."""
    _annotations.slot_of, previous = variable, _annotations.slot_of
    try:
        yield
    finally:
        _annotations.slot_of = previous


def owner_of_new_slot() -> Any:
    """Returns the variable that a new slot belongs to; None outside `making_slot_of`."""
    return _annotations.slot_of


@contextlib.contextmanager
def making_state_of_metric() -> Generator[None]:
    """Marks variables created in a `with` block as state of a metric."""
    previous, _annotations.is_of_metric = _annotations.is_of_metric, True
    try:
        yield
    finally:
        _annotations.is_of_metric = previous


def is_making_state_of_metric() -> bool:
    """True if a variable created now is state of a metric."""
    return _annotations.is_of_metric


@contextlib.contextmanager
def making_worker_local() -> Generator[None]:
    """Keeps variables created in a `with` block local to each process, as seeds are."""
    previous, _annotations.is_worker_local = _annotations.is_worker_local, True
    try:
        yield
    finally:
        _annotations.is_worker_local = previous


def is_making_worker_local() -> bool:
    """True if a variable created now is local to each process."""
    return _annotations.is_worker_local

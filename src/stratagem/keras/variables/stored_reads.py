"""Reads of variables as they are stored: shards that a program over all devices computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy

__all__ = ["reading_as_stored", "reads_as_stored"]

_strategy: ContextVar[Strategy | None] = ContextVar("strategy read as stored", default=None)


@contextlib.contextmanager
def reading_as_stored(strategy: Strategy | None) -> Generator[None]:
    """Makes reads of a strategy's variables in this thread return arrays on all its devices.

    None restores reads on one device.
    """
    token = _strategy.set(strategy)
    try:
        yield
    finally:
        _strategy.reset(token)


def reads_as_stored(strategy: Strategy) -> bool:
    """Returns True in `reading_as_stored` of this strategy."""
    return _strategy.get() is strategy

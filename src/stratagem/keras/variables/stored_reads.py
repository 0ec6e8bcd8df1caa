"""Reads of variables as they are stored, and reads by one process that others take part in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


_strategy: ContextVar[Strategy | None] = ContextVar("strategy read as stored", default=None)
_announce: ContextVar[Callable[[Any], None] | None] = ContextVar("announce gather", default=None)


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


@contextlib.contextmanager
def announcing_gathers(announce: Callable[[Any], None]) -> Generator[None]:
    """Calls a function with each variable of which this thread is about to gather shards.

    All processes must run a gather; the function makes the others do so.
    """
    token = _announce.set(announce)
    try:
        yield
    finally:
        _announce.reset(token)


def announces_gathers() -> bool:
    """Returns True in `announcing_gathers`."""
    return _announce.get() is not None


def announce_gather(variable: object) -> None:
    """Makes other processes join the gather of a variable, if only this process reads it."""
    if (announce := _announce.get()) is not None:
        announce(variable)

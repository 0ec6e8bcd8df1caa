"""Reads of variables that wait until their result is used, or until a program takes the values."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

_lock = threading.RLock()
_waiting: weakref.WeakSet[LateRead] = weakref.WeakSet()


class LateRead:
    """A read of the present values of variables, which is made at most once, and as late as it can.

    `read` holds the arrays. A program that replaces them takes their memory, so that the read is
    made before it starts.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read: Callable[[], Any] | None = read
        self._result: Any = None
        with _lock:
            _waiting.add(self)

    def result(self) -> Any:
        """Returns the result; reads now if no one has."""
        with _lock:
            if self._read is not None:
                self._result = self._read()
                self.drop()
            return self._result

    def drop(self) -> None:
        """Ends the wait: the result, if not read yet, will not be used."""
        with _lock:
            self._read = None
            _waiting.discard(self)


def read_before_replacing() -> None:
    """Makes all reads that wait. Call it before a program takes the memory of variables."""
    if _waiting and not isinstance(jnp.zeros(()), Tracer):  # a traced program takes no memory
        with _lock:
            for one in [*_waiting]:
                one.result()

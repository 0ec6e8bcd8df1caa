"""What an `sg.function` reads and assigns while it is traced.

Variables keep their arrays themselves; while a function is traced in this thread they ask here
first, so that their arrays become inputs and outputs of its program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

__all__ = [
    "FunctionTrace",
    "KnownBuilds",
    "NeedsInitialization",
    "current_function_trace",
    "tracing_function",
]


@dataclasses.dataclass
class KnownBuilds:
    """Builds found by all traces of a function.

    Args:
        found: in traces that have created variables.
        keep: to be called after the last trace.
    """

    found: list[Any] = dataclasses.field(default_factory=list[Any])
    keep: list[Callable[[], None]] = dataclasses.field(default_factory=list[Callable[[], None]])


class FunctionTrace:
    """The variables of one trace.

    Args:
        values: the traced value of each variable that is an input, by its identity.
        builds: what is known of builds in the function.
    """

    def __init__(self, values: dict[int, Any], builds: KnownBuilds | None = None) -> None:
        self.builds = KnownBuilds() if builds is None else builds
        self._values = values
        self._inputs = set(values)
        self.read: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self.missed: dict[int, Any] = {}
        self.strategies: list[Any] = []

    def note_strategy(self, strategy: Any) -> None:
        """Notes that a strategy runs a replica function in the function.

        Args:
            strategy: the strategy.
        """
        if strategy not in self.strategies:
            self.strategies.append(strategy)

    def load(self, variable: Any, stored: Any) -> Any:
        """Returns the value that a variable has at this point of the function.

        Args:
            variable: the variable.
            stored: what it holds; taken where it is no input, which makes the trace void.

        Returns:
            The value; None for a variable that has none yet.
        """
        key = id(variable)
        if key not in self._values:
            if stored is not None:
                self.missed[key] = variable
            return stored
        self.read[key] = variable
        return self._values[key]

    def store(self, variable: Any, value: Any) -> None:
        """Notes an assignment.

        Args:
            variable: the variable.
            value: its new value.
        """
        key = id(variable)
        if key not in self._inputs:
            self.missed[key] = variable
        self._values[key] = value
        self.written[key] = variable

    def value_of(self, variable: Any) -> Any:
        """Returns the value that an assigned variable has at the end of the function.

        Args:
            variable: one of `written`.

        Returns:
            The value.
        """
        return self._values[id(variable)]


class NeedsInitialization(BaseException):
    """Ends a trace in which variables were created, so that they get values outside of it.

    No Exception: code of the user must not catch it.

    Args:
        builds: what the trace has found out about builds.
    """

    def __init__(self, builds: Sequence[Any] = ()) -> None:
        super().__init__()
        self.builds = builds


class _Current(threading.local):
    trace: FunctionTrace | None = None


_current = _Current()


def current_function_trace() -> FunctionTrace | None:
    """Returns the trace of the `sg.function` that this thread is tracing; else None."""
    return _current.trace


@contextlib.contextmanager
def tracing_function(trace: FunctionTrace) -> Generator[None]:
    """Makes a trace current for the length of a `with` block.

    Args:
        trace: the trace.
    """
    outer, _current.trace = _current.trace, trace
    try:
        yield
    finally:
        _current.trace = outer

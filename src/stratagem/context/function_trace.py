"""`FunctionTrace`: variables that an `sg.function` reads and assigns while it is traced.

Variables normally hold their arrays themselves. During a trace in this thread they consult the
trace first, so that their arrays become inputs and outputs of the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts

__all__ = [
    "FunctionTrace",
    "KnownBuilds",
    "NeedsInitialization",
    "current_function_trace",
    "tracing_function",
]


@dataclasses.dataclass
class KnownBuilds:
    """Layer builds found by all traces of a function; `keep` are callbacks for after the last."""

    found: list[Any] = dataclasses.field(default_factory=list[Any])
    keep: list[Callable[[], None]] = dataclasses.field(default_factory=list[Callable[[], None]])


class FunctionTrace:
    """The variables of one trace; `values` are the traced inputs, by variable identity."""

    def __init__(self, values: dict[int, Any], builds: KnownBuilds | None = None) -> None:
        self.builds = KnownBuilds() if builds is None else builds
        self._values = values
        self._inputs = set(values)
        self.read: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self.missed: dict[int, Any] = {}
        self.strategies: list[StrategyParts] = []

    def note_strategy(self, strategy: StrategyParts) -> None:
        """Records that a strategy runs a replica function in the function."""
        if strategy not in self.strategies:
            self.strategies.append(strategy)

    def load(self, variable: object, stored: object) -> Any:
        """Returns a variable's value at this point of the function, or None if it has none yet.

        For a variable that is not an input, returns `stored`; the trace must then be repeated.
        """
        key = id(variable)
        if key not in self._values:
            if stored is not None:
                self.missed[key] = variable
            return stored
        self.read[key] = variable
        return self._values[key]

    def store(self, variable: object, value: object) -> None:
        """Records an assignment."""
        key = id(variable)
        if key not in self._inputs:
            self.missed[key] = variable
        self._values[key] = value
        self.written[key] = variable

    def value_of(self, variable: object) -> Any:
        """Returns an assigned variable's value at the end of the function."""
        return self._values[id(variable)]


class NeedsInitialization(BaseException):
    """Aborts a trace that created variables, so that they are initialized outside it.

    A BaseException, so that user code does not catch it. `builds` are the layer builds found.
    """

    def __init__(self, builds: Sequence[Any] = ()) -> None:
        super().__init__()
        self.builds = builds


class _CurrentTrace(threading.local):
    trace: FunctionTrace | None = None


_current = _CurrentTrace()


def current_function_trace() -> FunctionTrace | None:
    """Returns the trace of the `sg.function` being traced by this thread, or None."""
    return _current.trace


@contextlib.contextmanager
def tracing_function(trace: FunctionTrace) -> Generator[None]:
    """Makes a trace current within a `with` block."""
    outer, _current.trace = _current.trace, trace
    try:
        yield
    finally:
        _current.trace = outer

"""Closures: scheduled calls of functions, and the errors of those that cannot run.

Source: TF 2.21 cluster_coordinator.py, Closure.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stratagem.errors import CancelledError, ClosureInputError
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.remote_value import RemoteValue, RemoteValueStatus

if TYPE_CHECKING:
    from stratagem.parameter_server.coordinator.shipping import ShippedCall


_numbers = itertools.count(1)


class Closure:
    """One scheduled call of a function.

    `call` is the payload for the worker and `name` the function's name for messages. The call
    starts once all `inputs` are ready, on `worker` only, or on any worker if None. `number` is
    unique in this process. `runner` is the worker that it was last given to.
    """

    def __init__(
        self,
        call: ShippedCall,
        *,
        name: str,
        inputs: Sequence[RemoteValue] = (),
        worker: int | None = None,
    ) -> None:
        self.call = call
        self.name = name
        self.inputs = tuple(inputs)
        self.worker = worker
        self.result = RemoteValue()
        self.number = next(_numbers)
        self.num_starts = 0
        self.runner = -1

    @property
    def is_done(self) -> bool:
        """True if it has run and succeeded."""
        return self.result.status is RemoteValueStatus.READY


class Countdown:
    """Calls `function` after `count` calls of its `count` method."""

    def __init__(self, count: int, function: Callable[[], None]) -> None:
        self._remaining = count
        self._function = function
        self._lock = threading.Lock()

    def count(self, _: object) -> None:
        """Counts one call, from any thread."""
        with self._lock:
            self._remaining -= 1
            is_last = self._remaining == 0
        if is_last:
            self._function()


def cancel(closures: Sequence[Closure], cause: BaseException | None = None) -> None:
    """Aborts the results of closures that will not run, because of an error or of `close`."""
    reason = "."
    if cause is not None:
        first_line = str(cause).partition("\n")[0]
        reason = f", because of an error: {type(cause).__name__}: {first_line}"
    for closure in closures:
        error = CancelledError(
            explain(
                f"{closure.name} was cancelled before it finished{reason}",
                expected="no error in another function (join() or schedule() raises it), and "
                "no close() of the coordinator before join().",
                fix="find the first error or the early close(), then schedule it again.",
                code="SG603",
            )
        )
        error.__cause__ = cause
        closure.result.abort(error)


def input_error(closure: Closure, failed: RemoteValue) -> ClosureInputError:
    """Returns the error of a closure whose input `failed`."""
    error = ClosureInputError(
        explain(
            f"An input of {closure.name} failed: {failed.error!r}",
            expected="inputs whose functions succeed.",
            fix="fix that error first, then schedule both functions again.",
            code="SG604",
        )
    )
    error.__cause__ = failed.error
    return error

"""`RemoteValue`: the future result of a scheduled function."""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.errors import CancelledError, ClosureInputError, explain

if TYPE_CHECKING:
    from stratagem.parameter_server.coordinator.shipping import ShippedCall

# Mapping over arguments and results. Unlike in JAX, dict keys need not be sortable.

# JAX's mapping takes longer for one leaf than all else.
_PLAIN = {bool, int, float, str, bytes, np.ndarray}


def map_structure(
    function: Callable[[Any], Any], value: object, is_leaf: Callable[[Any], bool] = lambda _: False
) -> Any:
    """Returns a structure with `function` applied to each leaf; dicts keep their order.

    Recurses into lists, tuples, dicts and JAX pytrees, except where `is_leaf` returns True.

    Example:
        >>> from stratagem.parameter_server.coordinator.remote_value import map_structure
        >>> map_structure(lambda leaf: leaf + 1, {"b": [1, None], 2: (3,)})
        {'b': [2, None], 2: (4,)}
    """
    kind: Any = type(value)
    if kind in _PLAIN or is_leaf(value):
        return function(value)
    if isinstance(value, dict) and kind is dict:
        return {key: map_structure(function, part, is_leaf) for key, part in value.items()}
    if isinstance(value, tuple | list) and (kind in (tuple, list) or hasattr(kind, "_fields")):
        parts = [map_structure(function, part, is_leaf) for part in value]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return jax.tree.map(function, value, is_leaf=is_leaf)


def leaves_of(value: object, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Returns the leaves of a structure; see `map_structure`."""
    container: Any = value
    if type(value) in (tuple, list) and not is_leaf(value):  # most arguments; see `_PLAIN`
        return [leaf for part in container for leaf in leaves_of(part, is_leaf)]
    leaves: list[Any] = []
    map_structure(leaves.append, value, is_leaf)
    return leaves


class RemoteValueStatus(enum.Enum):
    """Status of a `RemoteValue`.

    ABORTED means that the function failed, was cancelled, or lost its worker. In the last case it
    turns READY once the function has run again.
    """

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue:
    """Future result of a function scheduled with `ClusterCoordinator.schedule`, which creates it.

    It can be an argument of another scheduled function, which starts once the value is ready.

    `owner` identifies the coordinator that the value belongs to; None if it belongs to none.

    Example:
        >>> result = sg.coordinator.RemoteValue()
        >>> result.set_value({"loss": jax.numpy.asarray(0.5)})  # the coordinator does this
        >>> result.fetch()
        {'loss': array(0.5, dtype=float32)}

    Source: TF 2.21 remote_value.py, RemoteValue.
    """

    owner: Any = None

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._status = RemoteValueStatus.NOT_READY
        self._value: Any = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._observers: list[Callable[[RemoteValue], None]] = []

    def __repr__(self) -> str:
        return f"RemoteValue({self._status.value})"

    @property
    def status(self) -> RemoteValueStatus:
        """Current status."""
        return self._status

    @property
    def error(self) -> BaseException | None:
        """The error that aborted it; None if there is none or its function will run again."""
        return self._error

    def fetch(self) -> Any:
        """Waits for the value and returns it with NumPy arrays. Call in cross-replica context.

        Returns:
            The function's return value, with JAX arrays converted to NumPy arrays.

        Raises:
            CancelledError: the function was cancelled because another one failed. Any other error
                is the one that the function raised.

        Source: TF 2.21 remote_value.py, RemoteValue.fetch.
        """
        return map_structure(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, self._wait()
        )

    def get(self) -> Any:
        """Waits for the value and returns it with JAX arrays; otherwise as `fetch`.

        Source: TF 2.21 remote_value.py, RemoteValue.get.
        """
        return map_structure(
            lambda leaf: (
                jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
            ),
            self._wait(),
        )

    def set_value(self, value: object) -> None:
        """Sets the function's return value and makes the status READY."""
        self._change(RemoteValueStatus.READY, value, None)

    def abort(self, error: BaseException | None) -> None:
        """Makes the status ABORTED.

        With `error` None the function will run again, and `fetch` waits for it.
        """
        self._change(RemoteValueStatus.ABORTED, None, error)

    def observe(self, observer: Callable[[RemoteValue], None]) -> None:
        """Calls `observer` once the value is set or has failed, in the thread that settles it.

        If it is settled already, the call is immediate.
        """
        with self._changed:
            if not self._is_settled:
                self._observers.append(observer)
                return
        observer(self)

    @property
    def _is_settled(self) -> bool:
        return self._status is RemoteValueStatus.READY or self._error is not None

    def _change(
        self, status: RemoteValueStatus, value: object, error: BaseException | None
    ) -> None:
        with self._changed:
            self._status, self._value, self._error = status, value, error
            self._trace = error and error.__traceback__
            observers: list[Callable[[RemoteValue], None]] = []
            if self._is_settled:
                observers, self._observers = self._observers, []
            self._changed.notify_all()
        for observer in observers:
            observer(self)

    def _wait(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled)
            if isinstance(self._error, CancelledError):
                raise CancelledError(*self._error.args) from self._error.__cause__
            if self._error is not None:
                # Raised by each call: without the frames of earlier ones.
                raise self._error.with_traceback(self._trace)
            return self._value


# Closures: scheduled calls of functions, and the errors of those that cannot run.
#
# Source: TF 2.21 cluster_coordinator.py, Closure.

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

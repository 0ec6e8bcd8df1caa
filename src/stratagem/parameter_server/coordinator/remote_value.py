"""`RemoteValue`: the future result of a scheduled function."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
import numpy as np

from stratagem.errors import CancelledError
from stratagem.parameter_server.coordinator.structures import map_structure


class RemoteValueStatus(enum.Enum):
    """Status of a `RemoteValue`.

    ABORTED means that the function failed, was cancelled, or lost its worker. In the last case it
    turns READY once the function has run again.

    Example:
        >>> result = sg.coordinator.RemoteValue()
        >>> result.status is sg.coordinator.RemoteValueStatus.NOT_READY
        True
        >>> result.set_value(3)  # the coordinator does this
        >>> result.status.name
        'READY'

    Source: TF 2.21 remote_value.py, RemoteValueStatus.
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

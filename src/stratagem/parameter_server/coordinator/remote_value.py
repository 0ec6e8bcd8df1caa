"""The result of a scheduled function, which is there later."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem.errors import CancelledError
from stratagem.parameter_server.coordinator.structures import map_structure

__all__ = ["RemoteValue", "RemoteValueStatus"]


class RemoteValueStatus(enum.Enum):
    """Status of a remote value.

    ABORTED is that of a function that failed, was cancelled, or whose worker was lost; it turns
    READY when the function has run again.

    Source: TF 2.21 remote_value.py, RemoteValueStatus.
    """

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue:
    """The result of a function that `ClusterCoordinator.schedule` was given.

    Made by `schedule`. It may be an argument of another scheduled function, which starts when it is
    there.

    `owner` is what the coordinator knows it by that it is a result of; None of nobody.

    Source: TF 2.21 remote_value.py, RemoteValue.
    """

    owner: Any = None

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._status = RemoteValueStatus.NOT_READY
        self._value: Any = None
        self._error: BaseException | None = None
        self._observers: list[Callable[[RemoteValue], None]] = []

    def __repr__(self) -> str:
        return f"RemoteValue({self._status.value})"

    @property
    def status(self) -> RemoteValueStatus:
        """Status of the value."""
        return self._status

    @property
    def error(self) -> BaseException | None:
        """Why it was aborted; None where it was not, or its function will run again."""
        return self._error

    def fetch(self) -> Any:
        """Waits for the value and returns it as NumPy arrays. Call in cross-replica context.

        Returns:
            What the function returned, with NumPy arrays in place of those of JAX.

        Raises:
            CancelledError: the function was given up because another one failed. Otherwise what the
                function raised.

        Source: TF 2.21 remote_value.py, RemoteValue.fetch.
        """
        return map_structure(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, self._wait()
        )

    def get(self) -> Any:
        """Waits for the value and returns it as arrays of JAX; otherwise as `fetch`.

        Source: TF 2.21 remote_value.py, RemoteValue.get.
        """
        return map_structure(
            lambda leaf: (
                jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
            ),
            self._wait(),
        )

    def set_value(self, value: Any) -> None:
        """Makes it ready.

        Args:
            value: what the function returned.
        """
        self._change(RemoteValueStatus.READY, value, None)

    def abort(self, error: BaseException | None) -> None:
        """Makes it aborted.

        Args:
            error: why; None where the function is to run again, for which `fetch` waits.
        """
        self._change(RemoteValueStatus.ABORTED, None, error)

    def observe(self, observer: Callable[[RemoteValue], None]) -> None:
        """Calls a function when the value is there or will never be; at once if that is so now.

        Args:
            observer: the function, called in the thread that settles the value.
        """
        with self._changed:
            if not self._is_settled:
                self._observers.append(observer)
                return
        observer(self)

    @property
    def _is_settled(self) -> bool:
        return self._status is RemoteValueStatus.READY or self._error is not None

    def _change(self, status: RemoteValueStatus, value: Any, error: BaseException | None) -> None:
        with self._changed:
            self._status, self._value, self._error = status, value, error
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
                raise CancelledError(*self._error.args)
            if self._error is not None:
                raise self._error
            return self._value

"""What runs in a process that Ray has started: one object, which is served until the process ends.

Ray loads this module before any variable can be set there, so nothing here loads JAX.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from stratagem import environment
from stratagem.optional_libraries import load

__all__ = ["ServedProcess"]


class ServedProcess:
    """The inside of one process.

    Args:
        name: what Ray puts before each line that the process prints.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._served: Any = None

    def __repr__(self) -> str:
        return self._name

    def start(self, variables: Mapping[str, str], pickled: bytes) -> tuple[str, int]:
        """Makes the object.

        Args:
            variables: of the environment, set before anything else is loaded.
            pickled: by cloudpickle, a function and its arguments.

        Returns:
            The address of the object that the function returns, and the id of this process.

        Raises:
            Exception: what the function raises. ImportError: cloudpickle is not installed.
        """
        environment.replace({**environment.snapshot(), **variables})
        pickle = load("cloudpickle", needed_by=self._name, install="stratagem[ray]")
        serve, arguments = pickle.loads(pickled)
        self._served = serve(*arguments)
        return self._served.address, os.getpid()

    def hold(self) -> None:
        """Returns never: whoever waits for it learns when the process has died."""
        threading.Event().wait()

    def kill(self) -> None:
        """Dies at once, as from outside."""
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Closes the object, if there is one."""
        served, self._served = self._served, None
        if served is not None:
            served.close()

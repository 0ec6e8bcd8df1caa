"""What runs in a process that Ray has started: it keeps another one, which serves an object.

Ray loads this module before any variable can be set there, so nothing here loads JAX. The other one
is forked of a third that has loaded all that it needs, so that one that dies is there again soon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem import environment
from stratagem.launch.prefork.fork_server import ForkedProcess, Standby
from stratagem.optional_libraries import load

__all__ = ["HOST_VARIABLE", "ServedProcess"]

# By which what is forked knows the address of its machine, as Ray has it.
HOST_VARIABLE = "STRATAGEM_NODE_HOST"


class ServedProcess:
    """Keeps one process.

    Args:
        name: what Ray puts before each line that the process prints.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._standby: Standby | None = None
        self._process: ForkedProcess | None = None

    def __repr__(self) -> str:
        return self._name

    def start(
        self, variables: Mapping[str, str], modules: Sequence[str], pickled: bytes
    ) -> tuple[str, int]:
        """Starts the process; may be called again when that one has ended.

        Args:
            variables: of the environment, set before anything else is loaded.
            modules: what the process needs; loaded before it is there.
            pickled: by cloudpickle, a function and its arguments.

        Returns:
            The address of the object that the function returns, and the id of the process.

        Raises:
            RuntimeError: what is needed cannot be loaded, or the function raises an error.
            UnavailableError: the process has died. ImportError: Ray is not installed.
        """
        if self._standby is None or self._standby.is_over:
            ray = load("ray.util", needed_by=self._name, install="stratagem[ray]")
            host = {HOST_VARIABLE: str(ray.get_node_ip_address())}
            self._standby = Standby(modules, {**environment.snapshot(), **host, **variables})
        self._process = self._standby.start(pickled)
        return self._process.address, self._process.pid

    def hold(self) -> str:
        """Waits for the end of the process, and says in words how it ended."""
        assert self._process is not None
        return self._process.wait()

    def kill(self) -> None:
        """Kills the process, as from outside."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Closes the object, if there is one, and ends its process."""
        if self._process is not None:
            self._process.close()
        if self._standby is not None:
            self._standby.close()

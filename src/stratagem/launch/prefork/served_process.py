"""Ray actor that runs one forked process, which serves an object.

Ray imports this module before any variable can be set, so nothing here loads JAX. The process is
forked from a server with everything loaded, so that it restarts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem import environment
from stratagem.launch.prefork.fork_server import ForkedProcess, ForkServer
from stratagem.launch.tasks.exit_status import describe_exit
from stratagem.optional_libraries import load

# Gives forked processes the address of their machine, as Ray has it.
HOST_VARIABLE = "STRATAGEM_NODE_HOST"


class ServedProcess:
    """Runs one process. `name` is Ray's prefix for each line that it prints."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._server: ForkServer | None = None
        self._process: ForkedProcess | None = None

    def __repr__(self) -> str:
        return self._name

    def start(
        self, variables: Mapping[str, str], modules: Sequence[str], pickled: bytes
    ) -> tuple[str, int]:
        """Starts the process, also after an earlier one has ended; returns its address and pid.

        `variables` are set before anything is loaded, `modules` are imported in advance, `pickled`
        is a function and its arguments, by cloudpickle; the address is its result's. Raises
        RuntimeError if an import or the function failed, UnavailableError if the process died,
        ImportError without Ray.
        """
        if self._server is None or self._server.is_over:
            ray = load("ray.util", needed_by=self._name, install="stratagem[ray]")
            host = {HOST_VARIABLE: str(ray.get_node_ip_address())}
            self._server = ForkServer(modules, {**environment.snapshot(), **host, **variables})
        self._process = self._server.fork("object", pickled)
        return self._process.address, self._process.pid

    def hold(self) -> str:
        """Waits for the end of the process and describes it."""
        assert self._process is not None
        return describe_exit(self._process.wait())

    def kill(self) -> None:
        """Sends SIGKILL to the process."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Closes the object and ends its process."""
        if self._process is not None:
            self._process.close()
        if self._server is not None:
            self._server.close()

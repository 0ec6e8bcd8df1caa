"""Registry of parameter servers, shared by workers that run separate programs: a Ray actor.

Ray imports this module in the actor's process, so nothing here loads JAX.
"""

from __future__ import annotations

ACTOR = "stratagem servers"
NAMESPACE = "stratagem"


class ServerRegistry:
    """Addresses of the servers, the workers that use them, and the progress of the leader.

    `keys` are the cluster's, pickled. A lost server keeps its last address.
    """

    def __init__(self, keys: bytes, addresses: list[str]) -> None:
        self._keys = keys
        self._addresses = addresses
        self._present: dict[int, str] = {}  # node of each worker
        self._num_begun = 0

    def enter(self, worker: int, node: str) -> tuple[bytes, list[str]]:
        """Adds a worker by its id, with the id of its machine; returns keys and addresses."""
        self._present[worker] = node
        return self._keys, self._addresses

    def leave(self, worker: int) -> None:
        """Removes a worker that has finished."""
        self._present.pop(worker, None)

    def present(self) -> dict[int, str]:
        """Returns the workers that have not finished, with the node of each."""
        return self._present

    def begin(self, number: int) -> None:
        """Records that the leader has initialized the variables of a training, from 1."""
        self._num_begun = max(self._num_begun, number)

    def num_begun(self) -> int:
        """Returns the number of trainings that the leader has begun."""
        return self._num_begun

    def move(self, server: int, address: str) -> None:
        """Records the new address of a server."""
        self._addresses[server] = address

    def address_of(self, server: int) -> str:
        """Returns the address of a server."""
        return self._addresses[server]

    def __repr__(self) -> str:
        return "server registry"

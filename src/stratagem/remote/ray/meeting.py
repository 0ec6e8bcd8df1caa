"""Where workers with programs of their own learn of their servers and of each other: an actor.

Ray loads this module in the actor's process, so nothing here loads JAX.
"""

from __future__ import annotations

__all__ = ["ACTOR", "Meeting", "NAMESPACE"]

ACTOR = "stratagem servers"
NAMESPACE = "stratagem"


class Meeting:
    """Knows the servers, who uses them, and how far the leader is.

    Args:
        keys: of the cluster, pickled.
        addresses: of the servers; of one that was lost, where it was.
    """

    def __init__(self, keys: bytes, addresses: list[str]) -> None:
        self._keys = keys
        self._addresses = addresses
        self._present: dict[int, str] = {}  # the node of each worker
        self._num_begun = 0

    def enter(self, worker: int, node: str) -> tuple[bytes, list[str]]:
        """Notes that a worker is there.

        Args:
            worker: its id in the cluster.
            node: the id of its machine.

        Returns:
            The keys and the addresses.
        """
        self._present[worker] = node
        return self._keys, self._addresses

    def leave(self, worker: int) -> None:
        """Notes that a worker has finished.

        Args:
            worker: its id in the cluster.
        """
        self._present.pop(worker, None)

    def present(self) -> dict[int, str]:
        """Returns the workers that have not finished, and the node of each."""
        return self._present

    def begin(self, number: int) -> None:
        """Notes that the leader has made the variables of a training, and given them values.

        Args:
            number: of the training, from 1.
        """
        self._num_begun = max(self._num_begun, number)

    def num_begun(self) -> int:
        """Returns how many trainings the leader has begun."""
        return self._num_begun

    def move(self, server: int, address: str) -> None:
        """Notes where a server is now.

        Args:
            server: its index.
            address: where.
        """
        self._addresses[server] = address

    def address_of(self, server: int) -> str:
        """Returns where a server is.

        Args:
            server: its index.
        """
        return self._addresses[server]

    def __repr__(self) -> str:
        return "meeting"

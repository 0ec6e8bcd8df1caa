"""The memory that a listener shares with its clients, by the connection of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.parameter_server.transport.shared_memory import ServerMemory, is_placed
from stratagem.parameter_server.transport.wire import SHARED

__all__ = ["ClientMemories"]


class ClientMemories:
    """Shared memory of a listener's clients, for large arrays. For one thread."""

    def __init__(self) -> None:
        self._memories: dict[bytes, ServerMemory] = {}

    def __len__(self) -> int:
        return len(self._memories)

    def share(self, connection: bytes, told: Any) -> list[Any]:
        """Opens what a client has told of, and forgets those of clients that are gone.

        Args:
            connection: of the client.
            told: `ClientMemory.told`.

        Returns:
            The answer: whether it can be used.
        """
        for other in [other for other, memory in self._memories.items() if not memory.is_in_use]:
            self.forget(other)
        self.forget(connection)
        try:
            self._memories[connection] = ServerMemory(bytes(told))
        except (OSError, TypeError, ValueError, OverflowError):  # such as in another container
            return [SHARED, b""]
        return [SHARED, b"here"]

    def can_read(self, connection: bytes, frames: Sequence[Any]) -> bool:
        """Returns True if all frames of a request can be read.

        A client whose connection broke, and was made anew without its knowing, has shared its
        memory by the former one.

        Args:
            connection: by which it came.
            frames: as they arrived.
        """
        return connection in self._memories or not is_placed(frames)

    def read(self, connection: bytes, frames: Sequence[Any]) -> list[Any]:
        """Returns a request with all of its frames.

        Args:
            connection: by which it came.
            frames: as they arrived; those that `can_read`.

        Raises:
            ConnectionError: they are not within the memory that is shared.
        """
        return self._memories[connection].read(frames) if is_placed(frames) else [*frames]

    def placed(self, connection: bytes, frames: Sequence[Any]) -> list[Any]:
        """Returns an answer as it is sent.

        Args:
            connection: by which it goes.
            frames: the answer.
        """
        memory = self._memories.get(connection)
        return [*frames] if memory is None else memory.placed(frames)

    def forget(self, connection: bytes) -> None:
        """Lets go of the memory of a connection, which nobody uses any more.

        Args:
            connection: of the client.
        """
        self._memories.pop(connection, None)

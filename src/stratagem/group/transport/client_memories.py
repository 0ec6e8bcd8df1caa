"""Shared memory between a listener and its clients, by connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.group.transport.shared_memory import ServerMemory, is_placed
from stratagem.group.transport.wire import SHARED

_UNUSABLE = (AttributeError, OSError, OverflowError, RecursionError, TypeError, ValueError)


class ClientMemories:
    """Shared memory for large arrays, by client connection. Not thread-safe."""

    def __init__(self) -> None:
        self._memories: dict[bytes, ServerMemory] = {}

    def __len__(self) -> int:
        return len(self._memories)

    def share(self, connection: bytes, offer: bytes) -> list[Any]:
        """Opens memory offered as `ClientMemory.offer`, and returns the answer: usable or not.

        Also drops the memory of clients that have exited.
        """
        self.forget_dead()
        self.forget(connection)
        try:
            self._memories[connection] = ServerMemory(bytes(offer))
        except _UNUSABLE:  # for example, in another container
            return [SHARED, b""]
        return [SHARED, b"here"]

    def can_read(self, connection: bytes, frames: Sequence[Any]) -> bool:
        """Returns True if all frames of a request can be read.

        False after an unnoticed reconnect: the client shared its memory over the previous
        connection.
        """
        return connection in self._memories or not is_placed(frames)

    def read(self, connection: bytes, frames: Sequence[Any]) -> list[Any]:
        """Returns a request with all frames, after `can_read`.

        Raises:
            ConnectionError: a frame lies outside the shared memory.
        """
        return self._memories[connection].read(frames) if is_placed(frames) else [*frames]

    def placed(self, connection: bytes, frames: Sequence[Any]) -> list[Any]:
        """Returns the frames to send, with large arrays moved to shared memory if possible."""
        memory = self._memories.get(connection)
        return [*frames] if memory is None else memory.placed(frames)

    def forget_dead(self) -> None:
        """Drops the memory of clients that have exited or closed it."""
        for other in [other for other, memory in self._memories.items() if not memory.is_in_use]:
            self.forget(other)

    def forget_all(self) -> None:
        """Drops all memory."""
        self._memories.clear()

    def forget(self, connection: bytes) -> None:
        """Drops the memory of a connection that is no longer used."""
        self._memories.pop(connection, None)

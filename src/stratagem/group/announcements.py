"""What one process tells all without being asked, and without waiting for anybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Announcements", "Listener"]

Listener = Callable[[int, list[int]], None]
"""Called with the number of the process that speaks, and what it says."""


class Announcements:
    """Who listens to what in this process.

    What is announced before anybody listens is kept: a process may hear of something before it has
    come so far as to ask for it.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._kept: dict[str, list[tuple[int, list[int]]]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Hands an announcement to the one that listens, or keeps it.

        Args:
            message: `announced`, as process 0 sends it.
        """
        topic, told = message["topic"], (message["process_id"], message["numbers"])
        listener = self._listeners.get(topic)
        if listener is None:
            self._kept.setdefault(topic, []).append(told)
        else:
            listener(*told)

    def listen(self, topic: str, listener: Listener) -> None:
        """Hands over what is kept of a topic, and from now on all that is announced.

        Args:
            topic: that nobody listens to yet.
            listener: must neither wait nor raise.
        """
        self._listeners[topic] = listener
        for told in self._kept.pop(topic, []):
            listener(*told)

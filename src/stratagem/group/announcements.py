"""Announcements to all processes, delivered without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Listener = Callable[[int, list[int]], None]
"""Called with the id of the announcing process and its numbers."""


class Announcements:
    """Listeners by topic; announcements without one are stored, as others may be ahead."""

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._pending: dict[str, list[tuple[int, list[int]]]] = {}

    def deliver(self, message: dict[str, Any]) -> None:
        """Delivers the announcements of a message to their listeners, or stores them."""
        for topic, process_id, numbers in message["announcements"]:
            listener = self._listeners.get(topic)
            if listener is None:
                self._pending.setdefault(topic, []).append((process_id, numbers))
            else:
                listener(process_id, numbers)

    def listen(self, topic: str, listener: Listener) -> None:
        """Registers a topic's only listener, which must not block or raise."""
        self._listeners[topic] = listener
        for announcement in self._pending.pop(topic, []):
            listener(*announcement)

"""Task that runs on another node, as node 0 sees it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import IO, Any

from stratagem.launch.nodes.rendezvous import Node
from stratagem.launch.plan.task_plan import TaskPlan


class NodeTask:
    """Process and output of a task of another node; `send` sends a message there.

    The node itself shows the output. When the node is lost, so are its tasks.
    """

    def __init__(
        self, plan: TaskPlan, node: Node, start: int, send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.plan = plan
        self.signals: set[int] = set()
        self.is_gone = False
        self.group = 0
        self.streams: Sequence[IO[bytes]] = ()
        self.is_shown = False
        self._node = node
        self._key = (start, plan.name)
        self._send = send

    @property
    def reason(self) -> str:
        """Why it ended, if its exit code does not say so."""
        message = self._node.exits.get(self._key)
        return self._node.reason if message is None else str(message.get("reason", ""))

    def returncode(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
        message = self._node.exits.get(self._key)
        if message is None:
            return -signal.SIGKILL if self._node.reason else None
        return message["returncode"]

    def last_lines(self) -> tuple[str, ...]:
        """Returns the last lines, which arrive with the exit code."""
        message = self._node.exits.get(self._key)
        return () if message is None else message["lines"]

    def send(self, signum: int) -> None:
        """Sends a signal to the task."""
        self.signals.add(signum)
        start, task = self._key
        self._send({"kind": "signal", "start": start, "task": task, "signum": int(signum)})

    def look_for_members(self) -> bool:
        """Updates and returns `is_gone`."""
        self.is_gone = bool(self._node.reason) or self._key in self._node.gone
        return self.is_gone

    def read(self, stream: IO[bytes]) -> None:
        """There is nothing to read here."""

    def read_all(self, stream: IO[bytes]) -> bytes:
        """Returns no bytes."""
        return b""

    def take(self, data: bytes, now_s: float, *, stream: int) -> None:
        """Nothing arrives here."""

    def show_overdue(self, now_s: float) -> None:
        """There is nothing to show here."""

    def show_rest(self, now_s: float) -> None:
        """There is nothing to show here."""

    def wait(self) -> None:
        """Does not wait: its node kills it."""

    def close(self) -> None:
        """Releases nothing."""

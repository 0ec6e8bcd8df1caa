"""Streams of value exchanges, from the side of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.group.wire import decode, encode
from stratagem.messages import explain

# A process that leaves a loop with an error reports the error when its program ends, a bit later.
_ERROR_REPORT_S = 2.0


class Streams:
    """All open streams of this process.

    `changed` is held to read or change a stream, and notified of every change. `send` sends a
    message to process 0, in call order, without waiting. `check` raises the error that ended the
    group, if any.
    """

    def __init__(
        self,
        label: str,
        changed: threading.Condition,
        *,
        send: Callable[[dict[str, Any]], None],
        check: Callable[[], None],
    ) -> None:
        self.label = label
        self.changed = changed
        self.send = send
        self.check = check
        self._open: dict[str, Stream] = {}

    def open(self, name: str) -> Stream:
        """Opens a stream; `name` is unique and the same on all processes."""
        with self.changed:
            stream = self._open[name] = Stream(name, self)
        return stream

    def forget(self, name: str) -> None:
        """Ignores further messages of a stream."""
        self._open.pop(name, None)

    def deliver(self, message: dict[str, Any]) -> None:
        """Delivers an `exchanged` or `abandoned` message to its stream, if open."""
        stream = self._open.get(message["stream"])
        if stream is not None:
            stream.answers[message["number"]] = message


class Stream:
    """A sequence of exchanges, in the same order on every process.

    `answers` holds replies of process 0 by exchange number until they are consumed.
    """

    def __init__(self, name: str, streams: Streams) -> None:
        self._name = name
        self._streams = streams
        self._number = 0
        self._is_closed = False
        self.answers: dict[int, dict[str, Any]] = {}

    def exchange(
        self,
        value: object,
        *,
        name: str | None = None,
        limit_s: float | None = None,
        setting: str = "STRATAGEM_STUCK_TIMEOUT_S",
    ) -> list[Any] | None:
        """Sends a value to all processes and returns theirs; None if the stream was closed.

        `name` is None for reading ahead; `limit_s` None waits until a program waits too long.
        Messages name the `setting` that changes the limit. Raises RuntimeError if another process
        closed the stream, or the error of `check`.
        """
        own = encode(value)
        with self._streams.changed:
            if self._is_closed:
                return None
            number, self._number = self._number, self._number + 1
            # Sent with the lock held, so that no exchange follows the message of `close`.
            self._streams.send(
                {
                    "kind": "exchange",
                    "stream": self._name,
                    "number": number,
                    "name": name or f"batches of {self._name}",
                    "value": own,
                    "limit_s": limit_s,
                    "setting": setting,
                }
            )
            self._wait_for(lambda: number in self.answers)
            answer = self.answers.pop(number, None)
            if answer is not None and "by" in answer:
                self._wait_for(lambda: False, _ERROR_REPORT_S)
            if self._is_closed:
                return None
        assert answer is not None
        if "by" in answer:
            raise self._abandoned_error(answer["by"], number)
        return [decode(value) for value, count in answer["runs"] for _ in range(count)]

    def _wait_for(self, is_ready: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Waits for a condition, for the end of the stream or of the group, or for the limit."""
        deadline = time.monotonic() + limit_s
        while not is_ready() and not self._is_closed and time.monotonic() < deadline:
            self._streams.check()
            self._streams.changed.wait(min(1.0, limit_s))

    def close(self) -> None:
        """Leaves the stream, wakes its waiting threads and notifies the other processes.

        May be called repeatedly and from any thread.
        """
        with self._streams.changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._streams.forget(self._name)
            self._streams.send({"kind": "leave", "stream": self._name})
            self._streams.changed.notify_all()

    def _abandoned_error(self, by: list[str], number: int) -> RuntimeError:
        return RuntimeError(
            explain(
                f"{', '.join(by)} left the loop over {self._name}, but {self._streams.label} "
                f"needs batch {number + 1}.",
                expected="the same number of steps on every process.",
                fix="find where their programs differ: a `break` or a condition on the process, "
                "an iterator that only some of them close, an error that only one catches.",
                code="SG507",
            )
        )

"""The streams of exchanges of one process: what it hands in, and what it hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.group.wire import decode, encode
from stratagem.messages import explain

__all__ = ["Stream", "Streams"]

# Who leaves a loop by an error tells it when its program ends, which is a little later.
_LAST_WORDS_S = 2.0


class Streams:
    """The streams that this process takes part in.

    Args:
        label: the name of this process.
        changed: held by whoever looks at them or changes them, notified of every change.
        send: sends a message to process 0, in the order of the calls, without waiting.
        check: raises what ended the group, if anything did.
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
        """Begins to take part in a stream.

        Args:
            name: the same on all processes, and new.

        Returns:
            The stream.
        """
        with self.changed:
            stream = self._open[name] = Stream(name, self)
        return stream

    def forget(self, name: str) -> None:
        """Does without what is still told about a stream.

        Args:
            name: of the stream.
        """
        self._open.pop(name, None)

    def take(self, message: dict[str, Any]) -> None:
        """Hands what process 0 says to the stream that waits for it, if one does.

        Args:
            message: `exchanged` or `abandoned`.
        """
        stream = self._open.get(message["stream"])
        if stream is not None:
            stream.answers[message["number"]] = message


class Stream:
    """Exchanges that follow one another, in the same order on every process.

    Args:
        name: the same on all.
        streams: of this process.

    `answers` holds what process 0 has said, by the number of the exchange, until it is taken.
    """

    def __init__(self, name: str, streams: Streams) -> None:
        self._name = name
        self._streams = streams
        self._number = 0
        self._is_closed = False
        self.answers: dict[int, dict[str, Any]] = {}

    def exchange(
        self,
        value: Any,
        *,
        place: str | None = None,
        limit_s: float | None = None,
        setting: str = "STRATAGEM_STUCK_TIMEOUT_S",
    ) -> list[Any] | None:
        """Hands a value to all processes and waits for theirs.

        Args:
            value: small; see `wire.encode` for what it may be.
            place: where the program is, the same on all; None for reading ahead of it.
            limit_s: how long to wait for the others; None for until a program waits too long.
            setting: what changes that limit, for the message.

        Returns:
            The values of all processes, in their order; None where the stream was closed.

        Raises:
            RuntimeError: another process has closed the stream; and what ended the group.
        """
        own = encode(value)
        with self._streams.changed:
            if self._is_closed:
                return None
            number, self._number = self._number, self._number + 1
            # Sent while nobody can close the stream: what is sent afterwards opens nothing anew.
            self._streams.send(
                {
                    "kind": "exchange",
                    "stream": self._name,
                    "number": number,
                    "name": place or f"batches of {self._name}",
                    "value": own,
                    "limit_s": limit_s,
                    "setting": setting,
                }
            )
            self._wait_for(lambda: number in self.answers)
            answer = self.answers.pop(number, None)
            if answer is not None and "by" in answer:
                self._wait_for(lambda: False, _LAST_WORDS_S)
            if self._is_closed:
                return None
        assert answer is not None
        if "by" in answer:
            raise self._abandoned(answer["by"], number)
        return [decode(part) for part in answer["values"]]

    def _wait_for(self, is_there: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Waits for something, for the end of the stream or of the group, or for a limit."""
        deadline = time.monotonic() + limit_s
        while not is_there() and not self._is_closed and time.monotonic() < deadline:
            self._streams.check()
            self._streams.changed.wait(min(1.0, limit_s))

    def close(self) -> None:
        """Takes no part any more: who waits here hears of it, and process 0 tells the others.

        May be called again, and from any thread.
        """
        with self._streams.changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._streams.forget(self._name)
            self._streams.send({"kind": "leave", "stream": self._name})
            self._streams.changed.notify_all()

    def _abandoned(self, by: list[str], number: int) -> RuntimeError:
        return RuntimeError(
            explain(
                f"{', '.join(by)} left the loop over {self._name}, of which {self._streams.label} "
                f"asks for batch {number + 1}.",
                expected="as many steps on every process.",
                fix="see where their programs part: a `break` or a condition on the process, an "
                "iterator that only some of them close, an error that one of them goes on after.",
            )
        )

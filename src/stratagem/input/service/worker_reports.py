"""Requests of a worker to its dispatcher about one run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.wire import Message

_AGAIN_S = 0.1


class WorkerReports:
    """Asks the dispatcher about a run, again and again while it is away.

    `ask` sends one request. All answers are None once the run is over here, after `end`.
    """

    def __init__(self, run: str, worker: str, ask: Callable[[Message], Message]) -> None:
        self._run = run
        self._worker = worker
        self._ask_once = ask
        self._has_ended = threading.Event()

    def end(self) -> None:
        """Ends the requests."""
        self._has_ended.set()

    def next_split(self, holding: Mapping[int, int], *, only_wanted: bool) -> Message | None:
        """Asks for a split; `holding` are those that the worker has, with their attempts."""
        return self._ask("next_split", holding={**holding}, only_wanted=only_wanted)

    def done(self, split: int, attempt: int) -> bool:
        """Reports that all batches of a split have arrived; returns True once it is noted."""
        return self._ask("done_split", split=split, attempt=attempt) is not None

    def dropped(self, split: int, attempt: int) -> None:
        """Reports that the worker sends no more of a split that was taken from it."""
        fields = {"split": split, "attempt": attempt + 1, "ranges": []}
        self._ask("report", reporter=self._worker, **fields)

    def failed(self, error: dict[str, Any]) -> bool:
        """Reports an error of reading a batch; returns True if the batch is skipped."""
        answer = self._ask("fail", error=error)
        return answer is not None and answer.kind == "skip"

    def _ask(self, kind: str, **fields: Any) -> Message | None:
        message = Message(kind, {"run": self._run, "worker": self._worker, **fields})
        while not self._has_ended.is_set():
            try:
                return self._ask_once(message)
            except (UnavailableError, ServerError):
                self._has_ended.wait(_AGAIN_S)
        return None

"""Frames: messages from a job to its client, as marked lines of the job's log.

A line is a mark, the job's nonce and JSON in ASCII, so that any output of a program arrives
unchanged, including carriage returns. An answer is pickled, split and signed.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import threading
from collections.abc import Iterator

from stratagem.messages import explain

_MARK = "\x1e"
# Ray's own messages with ten lines each must stay below 4 MB.
_MAX_TEXT = 32_000
_MAX_LINE = 2**20


@dataclasses.dataclass(frozen=True)
class LogFrame:
    """One message of a job.

    `kind` is "out", "err", "heartbeat", "started", "note", "answer" or "end"; `task` is "" for the
    job itself.
    """

    kind: str
    task: str
    text: str


class FrameWriter:
    """Writes the frames of a job to the file descriptor of its log. Thread-safe."""

    def __init__(self, nonce: str, descriptor: int) -> None:
        self._nonce = nonce
        self._descriptor = descriptor
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def write(self, kind: str, text: str, task: str = "") -> None:
        """Writes a frame, or several for a long text."""
        pieces = [text[at : at + _MAX_TEXT] for at in range(0, len(text), _MAX_TEXT)] or [""]
        with self._lock:
            for piece in pieces:
                content = json.dumps([next(self._numbers), kind, task, piece])
                # One write, so that nothing comes between; the newline ends a foreign line.
                line = f"\n{_MARK}{self._nonce}{content}\n".encode("ascii")
                while line:
                    line = line[os.write(self._descriptor, line) :]


class FrameReader:
    """Finds each frame once, even if the log is read again; `others` are the last lines."""

    def __init__(self, nonce: str) -> None:
        self._mark = f"{_MARK}{nonce}"
        self._pending = ""
        self._last = 0
        self.others: list[str] = []

    def feed(self, text: str) -> Iterator[LogFrame]:
        """Adds the next part of the log; yields the frames that are complete."""
        *lines, self._pending = (self._pending + text).split("\n")
        self._pending = self._pending[:_MAX_LINE]
        for line in lines:
            before, mark, content = line.partition(self._mark)
            if before.strip():
                self.others = [*self.others[-99:], before]
            if not mark:
                continue
            try:
                number, *words = json.loads(content)
            except (RecursionError, TypeError, ValueError):
                continue  # cut by a lost connection; it will be read again
            if list(map(type, [number, *words])) == [int, str, str, str] and number > self._last:
                self._last = number
                yield LogFrame(*words)


def signed(content: bytes, key: bytes) -> str:
    """Returns bytes as text, with a signature by the shared key."""
    digest = hmac.new(key, content, hashlib.sha256).digest()
    return base64.b64encode(digest + content).decode("ascii")


def verified(text: str, key: bytes) -> bytes:
    """Returns the bytes of a signed text; raises ValueError if the signature does not match."""
    data = base64.b64decode(text)
    digest, content = data[:32], data[32:]
    if not hmac.compare_digest(digest, hmac.new(key, content, hashlib.sha256).digest()):
        raise ValueError(
            explain(
                "The signature of the job's answer is wrong.",
                expected="an answer from the program that this client sent.",
                fix="run it again; if this repeats, check who else can write to the cluster.",
            )
        )
    return content

"""What a job says to its client, in lines of its log that no other line is taken for.

A line is a mark, a number, and JSON in ASCII, so that carriage returns and whatever a program
prints arrive as they were. An answer is pickled, in pieces, and signed.
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
from typing import Any

from stratagem.messages import explain

__all__ = ["Frame", "FrameReader", "FrameWriter", "signed", "verified"]

_MARK = "\x1e"
# Ray's own messages with ten lines each must stay below 4 MB.
_MAX_TEXT = 32_000
_MAX_LINE = 2**20


@dataclasses.dataclass(frozen=True)
class Frame:
    """One thing that a job says.

    Args:
        kind: "out", "err", "started", "note", "answer" or "end".
        task: whose it is; "" for the job itself.
        text: what it says.
    """

    kind: str
    task: str
    text: str


class FrameWriter:
    """Writes frames into a log.

    Args:
        nonce: of the job; the client looks for it.
        descriptor: of the log.
    """

    def __init__(self, nonce: str, descriptor: int) -> None:
        self._nonce = nonce
        self._descriptor = descriptor
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def write(self, kind: str, text: str, task: str = "") -> None:
        """Writes a frame, or several where the text is long.

        Args:
            kind: of `Frame`.
            text: what it says.
            task: whose it is.
        """
        pieces = [text[at : at + _MAX_TEXT] for at in range(0, len(text), _MAX_TEXT)] or [""]
        with self._lock:
            for piece in pieces:
                content = json.dumps([next(self._numbers), kind, task, piece])
                # In one call, so that nothing else stands in between; it ends a line of others.
                line = f"\n{_MARK}{self._nonce}{content}\n".encode("ascii")
                while line:
                    line = line[os.write(self._descriptor, line) :]


class FrameReader:
    """Finds frames in what comes of a log; each once, also where the log is read again.

    Args:
        nonce: of the job.
    """

    def __init__(self, nonce: str) -> None:
        self._mark = f"{_MARK}{nonce}"
        self._pending = ""
        self._last = 0
        self.others: list[str] = []

    def feed(self, text: str) -> Iterator[Frame]:
        """Takes the next part of the log.

        Args:
            text: that part.

        Yields:
            The frames that are complete; lines that are none are kept in `others`.
        """
        *lines, self._pending = (self._pending + text).split("\n")
        self._pending = self._pending[:_MAX_LINE]
        for line in lines:
            before, mark, content = line.partition(self._mark)
            if before.strip():
                self.others = [*self.others[-99:], before]
            if not mark:
                continue
            try:
                number, kind, task, said = json.loads(content)
            except ValueError:
                continue  # cut where a connection broke; it comes again
            if number > self._last:
                self._last = number
                yield Frame(kind, task, said)


def signed(content: bytes, key: bytes) -> str:
    """Returns bytes as text that tells who has written them.

    Args:
        content: the bytes.
        key: that both sides know.
    """
    digest = hmac.new(key, content, hashlib.sha256).digest()
    return base64.b64encode(digest + content).decode("ascii")


def verified(text: str, key: bytes) -> bytes:
    """Returns the bytes that `signed` has made to text.

    Args:
        text: of `signed`.
        key: that both sides know.

    Raises:
        ValueError: somebody else has written it, or it is not whole.
    """
    data: Any = base64.b64decode(text)
    digest, content = data[:32], data[32:]
    if not hmac.compare_digest(digest, hmac.new(key, content, hashlib.sha256).digest()):
        raise ValueError(
            explain(
                "The answer of the job is not signed by it.",
                expected="an answer of the program that this client has sent.",
                fix="run it again; if this comes again, look who else can write into the cluster.",
            )
        )
    return content

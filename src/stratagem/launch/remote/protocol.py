"""Messages between a job and its client.

The client submits a job to Ray whose command is the program in `job.py` with a `JobPlan`, and
follows the log, which Ray streams to it. The job prints frames there: heartbeats from the beginning
on, "started" before the program, its output as "out" and "err", then its "answer" and the "end"
with the exit code; a "note" is a message of the job itself. From the first of them on, the client
renews a lease by small uploads.

If the client is gone, the lease expires and the program ends; if the client stops the job, Ray
sends SIGTERM. If the job is stopped or lost, the client misses its heartbeats. If a machine or Ray
itself is lost, the job says so and ends.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stratagem import environment
from stratagem.errors import invalid
from stratagem.group.authentication.secret import read_ray_token

JOB_VARIABLE = "STRATAGEM_REMOTE_JOB"
"""Environment variable of programs that a client has sent: the nonce of their job."""
ANSWER = "{answer}"
"""Stands for the file of the answer in the command of a program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Program, tasks and limits of a job.

    `command` has arguments for this Python. `nonce` is a random number that only client and job
    share. An empty `cluster` is a plain Ray cluster; without `tasks` one process runs on the head.
    An empty `head` or `url` (where the head accepts jobs) asks Ray. The job continues for `lease_s`
    without its client, or forever if None; it sends a heartbeat every `heartbeat_s`, or none if
    None. `answers` is the task whose answer is returned unless another fails, None for the first.
    `python` is the version that a pickled function needs, such as "3.11"; "" for any.
    """

    nonce: str
    command: Sequence[str]
    cluster: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: Sequence[Sequence[Any]] = ()
    head: str = ""
    url: str = ""
    lease_s: float | None = None
    heartbeat_s: float | None = None
    answers: Sequence[Any] | None = None
    python: str = ""

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of each process of the program."""
        found = {JOB_VARIABLE: self.nonce, "PYTHONUNBUFFERED": "1"}
        return {**found, "RAY_ADDRESS": self.head} if self.head else found


# Frames: messages from a job to its client, as marked lines of the job's log.
#
# A line is a mark, the job's nonce and JSON in ASCII, so that any output of a program arrives
# unchanged: Ray's log mixes both streams, contains lines of Ray, and turns carriage returns into
# line ends. The numbers tell what is new when a client reads the log again.

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


def answer_key(nonce: str) -> bytes:
    """Returns the key with which a job signs its answer."""
    return f"{read_ray_token(environment.snapshot())} {nonce}".encode()


def signed(answer: str, key: bytes) -> str:
    """Returns an answer, text in base64, behind its signature by the shared key."""
    return hmac.new(key, answer.encode(), hashlib.sha256).hexdigest() + answer


def verified(text: str, key: bytes) -> bytes:
    """Returns the bytes of a signed answer; raises ValueError if the signature does not match."""
    length = 2 * hashlib.sha256().digest_size
    if not hmac.compare_digest(signed(text[length:], key).encode(), text.encode()):
        raise invalid(
            "The signature of the job's answer is wrong.",
            expected="an answer from the program that this client sent.",
            fix="run it again; if this repeats, check who else can write to the cluster.",
        )
    return base64.b64decode(text[length:])


# Lease of a client, so that its job ends when the client is gone.
#
# A client may reach nothing but the port for jobs, and uploads are the only requests there that a
# job can see. So the client uploads small packages with increasing numbers in their names, and the
# job asks for the next one. Ray 2.60 deletes such packages after 10 minutes
# (RAY_RUNTIME_ENV_URI_PIN_EXPIRATION_S_DEFAULT), so the first upload comes when the job has been
# heard, however long it waited for its start, and neither side waits longer than a minute.

_RENEWALS_PER_LEASE = 6
_MAX_RENEWAL_S = 60.0


def renewal_s(limit_s: float) -> float:
    """Returns the time between renewals, and between looks for them, of a lease."""
    return min(limit_s / _RENEWALS_PER_LEASE, _MAX_RENEWAL_S)


def lease_path(nonce: str, number: int) -> str:
    """Returns the path of a renewal at the port for jobs."""
    return f"/api/packages/gcs/stratagem_client_{nonce}_{number}.zip"

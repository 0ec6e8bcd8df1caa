"""Log of a job, followed by its client: shows the output and returns the result."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from stratagem import settings
from stratagem.errors import UnavailableError, explain
from stratagem.launch.remote.jobs.jobs_client import JobsClient, JobState
from stratagem.launch.tasks.output import STDERR, STDOUT, LineBuffer, Screen
from stratagem.resources import Closing

# Frames: messages from a job to its client, as marked lines of the job's log.
#
# A line is a mark, the job's nonce and JSON in ASCII, so that any output of a program arrives
# unchanged, including carriage returns. An answer is pickled, split and signed.

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


# Display of a job's output on the screen of its client.

_STREAMS = {"out": STDOUT, "err": STDERR}


class JobOutput:
    """Shows the output of a job's tasks, each line behind the name of its task.

    Without task names there is one process, whose output is shown unchanged, with moving progress
    bars.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._screen = Screen(tasks) if tasks else None
        self._buffers = {
            (task, stream): LineBuffer() for task in tasks for stream in _STREAMS.values()
        }

    def show(self, frame: LogFrame) -> None:
        """Shows a frame of kind "out" or "err"."""
        stream = _STREAMS[frame.kind]
        if self._screen is None:
            target = (sys.stdout, sys.stderr)[stream]
            encoding = target.encoding or "utf-8"
            target.write(frame.text.encode(encoding, "replace").decode(encoding))
            target.flush()
            return
        buffer = self._buffers[frame.task, stream]
        self._show_lines(frame.task, buffer.feed(frame.text.encode(), time.monotonic()), stream)

    def show_overdue(self) -> None:
        """Shows unfinished lines that have waited too long."""
        now_s = time.monotonic()
        for (task, stream), buffer in self._buffers.items():
            self._show_lines(task, buffer.overdue(now_s), stream)

    def show_rest(self) -> None:
        """Shows all unfinished lines."""
        for (task, stream), buffer in self._buffers.items():
            self._show_lines(task, buffer.rest(), stream)

    def _show_lines(self, task: str, lines: list[bytes], stream: int) -> None:
        if self._screen is not None:
            texts = [line.decode("utf-8", "replace") for line in lines]
            self._screen.show(task, texts, stream=stream)


_POLL_S = 0.25
_RETRY_S = 1.0
_CLOSING_S = 2.0
# Kinds of frames whose texts are returned or looked at.
_KEPT = ("answer", "end", "note", "started")
HEARTBEATS_PER_LIMIT = 3
"""Number of heartbeats of a job within `STRATAGEM_PEER_TIMEOUT_S`."""


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Result of a job: exit code of its program, signed answer ("" without one), and notes."""

    code: int
    answer: str
    notes: str


def follow(
    jobs: JobsClient,
    job: str,
    nonce: str,
    output: JobOutput,
    should_leave: Callable[[], bool] = lambda: False,
) -> JobResult | None:
    """Shows the output of a job until it ends; returns None once `should_leave()`.

    Raises UnavailableError if the cluster stops responding, or cannot start the program.
    """
    reader = FrameReader(nonce)
    texts: dict[str, list[str]] = {kind: [] for kind in _KEPT}
    heartbeats = _Heartbeats(job)
    with _JobLog(jobs, job) as log:
        while not texts["end"]:
            if should_leave():
                return None
            item = log.next(_POLL_S)
            if isinstance(item, Exception):
                raise item
            if isinstance(item, JobState):
                output.show_rest()
                return _result_without_end(item, texts, reader)
            for frame in reader.feed(item):
                heartbeats.note(frame)
                _handle(frame, output, texts)
            output.show_overdue()
            heartbeats.check()
    output.show_rest()
    return JobResult(int(texts["end"][-1]), "".join(texts["answer"]), "\n".join(texts["note"]))


def _handle(frame: LogFrame, output: JobOutput, texts: dict[str, list[str]]) -> None:
    if frame.kind in texts:
        texts[frame.kind].append(frame.text)
    elif frame.kind != "heartbeat":
        output.show(frame)
    if frame.kind == "note":
        print(frame.text, file=sys.stderr, flush=True)


def _result_without_end(
    state: JobState, texts: dict[str, list[str]], reader: FrameReader
) -> JobResult:
    """Returns the result of a job that ended without an "end" frame."""
    if not texts["started"] and state.status != "STOPPED":
        details = "\n".join(reader.others) or state.message
        raise UnavailableError(
            explain(
                f"The cluster could not start the program ({state.status}): {details}",
                expected="servers with the same version of stratagem as this client.",
                fix="check the output of `stratagem server` on the leader, and logs in /tmp/ray.",
            )
        )
    return JobResult(state.exit_code or 1, "", "\n".join(texts["note"]))


class _Heartbeats:
    """Last frame of a job that sends heartbeats. One whose program was stopped sends none.

    The limit is doubled: for the first half, the log may be without a connection.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._limit_s = 2 * float(settings.read("peer_timeout_s"))
        self._last_s: float | None = None

    def note(self, frame: LogFrame) -> None:
        """Records a frame."""
        if frame.kind == "heartbeat" or self._last_s is not None:
            self._last_s = time.monotonic()

    def check(self) -> None:
        """Raises UnavailableError if there was no frame within the limit."""
        if self._last_s is None or time.monotonic() - self._last_s <= self._limit_s:
            return
        raise UnavailableError(
            explain(
                f"The program of job {self._job} has sent no heartbeat for "
                f"{self._limit_s:g} s, though its cluster answers: it was stopped, or its machine "
                "is overloaded.",
                expected="a heartbeat within twice STRATAGEM_PEER_TIMEOUT_S.",
                fix="check the leader's machine, and run the program again: it resumes from its "
                "last checkpoint.",
                code="SG514",
            )
        )


class _JobLog(Closing):
    """Reads a log in another thread, so that this one notices an interruption at once."""

    def __init__(self, jobs: JobsClient, job: str) -> None:
        self._jobs = jobs
        self._job = job
        self._items: queue.SimpleQueue[str | JobState | Exception] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._limit_s = float(settings.read("peer_timeout_s"))
        self._responded_s = self._heard_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._reading: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="log of a job", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> str | JobState | Exception:
        """Returns the next part, "" after the timeout; finally the last state, or an error."""
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def close(self) -> None:
        """Closes the connection."""
        self._is_closed.set()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CLOSING_S)  # it may wait for an answer that will not come

    def _cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._read())
        except Exception as error:  # noqa: BLE001 - raised by follow()
            self._items.put(error)
        finally:
            self._loop.close()

    async def _read(self) -> None:
        """Reads the log until the job has ended, and reconnects when the connection is lost."""
        self._responded_s = time.monotonic()
        latest_start_s = self._responded_s + settings.read("join_timeout_s")
        while not self._is_closed.is_set():
            self._reading = self._loop.create_task(self._read_parts())
            watching = self._loop.create_task(self._end_if_quiet(self._reading))
            cause: Exception | str = "its log ended before it did"
            try:
                await asyncio.wait([self._reading])
                watching.cancel()
                await asyncio.wait([watching])  # a pending task would be reported at the end
                if self._is_closed.is_set():
                    return
                if not self._reading.cancelled():
                    self._reading.result()
                state = self._jobs.state(self._job)
                if state.has_ended:
                    self._items.put(state)
                    return
            except UnavailableError as error:
                cause = error
            if time.monotonic() < latest_start_s and self._is_starting():
                self._responded_s = time.monotonic()
            elif time.monotonic() - self._responded_s > self._limit_s:
                raise self._lost(cause)
            self._is_closed.wait(_RETRY_S)
            # Ends an incomplete line: the log is read from its beginning.
            self._items.put("\n")

    def _is_starting(self) -> bool:
        """Returns True for a job that its cluster can still start.

        The head alone proves nothing: it answers for jobs whose machine is gone, too.
        """
        try:
            return self._jobs.state(self._job).status == "PENDING" and bool(self._jobs.resources())
        except UnavailableError:
            return False

    async def _read_parts(self) -> None:
        connected_s = float("inf")
        try:
            async for text in self._jobs.log(self._job):
                self._heard_s = time.monotonic()
                connected_s = min(connected_s, self._heard_s)
                self._items.put(text)
        except asyncio.CancelledError:
            connected_s = float("inf")
            raise
        finally:
            # Until now, however long that was; the head also accepts what it then cannot serve.
            if time.monotonic() - connected_s > _RETRY_S:
                self._responded_s = time.monotonic()

    async def _end_if_quiet(self, reading: asyncio.Task[None]) -> None:
        """Ends the reading of a quiet log once no machine runs the job anymore.

        The head keeps such a log open, although its own connection to the job's machine is dead.
        """
        self._heard_s = time.monotonic()
        while True:
            await asyncio.sleep(self._limit_s)
            if time.monotonic() - self._heard_s >= self._limit_s and not self._is_running():
                reading.cancel()
                return

    def _is_running(self) -> bool:
        """Returns False once the job has ended or no machine is left; True after one failure."""
        try:
            is_running = not self._jobs.state(self._job).has_ended and bool(self._jobs.resources())
        except UnavailableError:
            return time.monotonic() - self._heard_s < 2 * self._limit_s
        if is_running:
            self._heard_s = self._responded_s = time.monotonic()
        return is_running

    def _lost(self, cause: Exception | str) -> UnavailableError:
        return UnavailableError(
            explain(
                f"The cluster has not responded about job {self._job} for {self._limit_s:g} s: "
                f"{cause}",
                expected="a leader that runs and can be reached, and a program that starts within "
                "STRATAGEM_JOIN_TIMEOUT_S.",
                fix="check the leader, start it again, and run the program again: it resumes from "
                "its last checkpoint. STRATAGEM_PEER_TIMEOUT_S changes the limit.",
                code="SG514",
            )
        )

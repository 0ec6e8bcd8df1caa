"""Log of a job, followed by its client: shows the output and returns the result."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from stratagem import environment
from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.launch.remote.jobs.job_output import JobOutput
from stratagem.launch.remote.jobs.jobs_client import JobState
from stratagem.launch.remote.jobs.log_frames import FrameReader, LogFrame
from stratagem.messages import explain

_POLL_S = 0.25
_RETRY_S = 1.0
_CLOSING_S = 2.0
# Kinds of frames whose texts are returned or looked at.
_KEPT = ("answer", "end", "note", "started")
HEARTBEATS_PER_LIMIT = 3
"""Number of heartbeats of a job within `STRATAGEM_PEER_TIMEOUT_S`."""


class _JobsApi(Protocol):
    def state(self, job: str) -> JobState: ...

    def resources(self) -> list[dict[str, float]]: ...  # of each machine

    def log(self, job: str) -> AsyncIterator[str]: ...  # begins with "" once it is connected


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Result of a job: exit code of its program, signed answer ("" without one), and notes."""

    code: int
    answer: str
    notes: str


def follow(
    jobs: _JobsApi,
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
        self._limit_s = 2 * float(environment.read("peer_timeout_s"))
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

    def __init__(self, jobs: _JobsApi, job: str) -> None:
        self._jobs = jobs
        self._job = job
        self._items: queue.SimpleQueue[str | JobState | Exception] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._limit_s = float(environment.read("peer_timeout_s"))
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
        latest_start_s = self._responded_s + environment.read("join_timeout_s")
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

"""A client beside its job: it shows what the job prints, and learns how it ends."""

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
from stratagem.errors import UnavailableError
from stratagem.messages import explain
from stratagem.remote.jobs.job_output import JobOutput
from stratagem.remote.jobs.jobs_client import JobState
from stratagem.remote.jobs.log_frames import Frame, FrameReader
from stratagem.servers.closing import Closing

__all__ = ["Ended", "follow"]

_POLL_S = 0.25
_RETRY_S = 1.0
_CLOSING_S = 2.0


class _Jobs(Protocol):
    def state(self, job: str) -> JobState: ...

    def log(self, job: str) -> AsyncIterator[str]: ...


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job has ended.

    Args:
        code: the exit code of its program.
        answer: what it has answered, signed; "" for nothing.
        notes: what the job itself has said.
    """

    code: int
    answer: str
    notes: str


def follow(
    jobs: _Jobs,
    job: str,
    nonce: str,
    output: JobOutput,
    should_leave: Callable[[], bool] = lambda: False,
) -> Ended | None:
    """Shows what a job prints until it ends.

    Args:
        jobs: of the cluster.
        job: its name.
        nonce: its number.
        output: where it is shown.
        should_leave: whether to look no further.

    Returns:
        How it has ended; None where it was left before.

    Raises:
        UnavailableError: the cluster does not answer any more, or could not start the program.
    """
    reader = FrameReader(nonce)
    kept: dict[str, list[str]] = {"answer": [], "end": [], "note": [], "started": []}
    with _JobLog(jobs, job) as log:
        while not kept["end"]:
            if should_leave():
                return None
            item = log.next(_POLL_S)
            if isinstance(item, Exception):
                raise item
            if isinstance(item, JobState):
                output.show_rest()
                return _ended_without_a_word(item, kept, reader)
            for frame in reader.feed(item):
                _take(frame, output, kept)
            output.show_overdue()
    output.show_rest()
    return Ended(int(kept["end"][-1]), "".join(kept["answer"]), "\n".join(kept["note"]))


def _take(frame: Frame, output: JobOutput, kept: dict[str, list[str]]) -> None:
    if frame.kind in kept:
        kept[frame.kind].append(frame.text)
    else:
        output.show(frame)
    if frame.kind == "note":
        print(frame.text, file=sys.stderr, flush=True)


def _ended_without_a_word(
    state: JobState, kept: dict[str, list[str]], reader: FrameReader
) -> Ended:
    if not kept["started"] and state.status != "STOPPED":
        said = "\n".join(reader.others) or state.message
        raise UnavailableError(
            explain(
                f"The cluster could not start the program ({state.status}): {said}",
                expected="servers that have the same version of stratagem as this client.",
                fix="look at what `stratagem server` prints on the leader, and at its logs in "
                "/tmp/ray.",
            )
        )
    return Ended(state.exit_code or 1, "", "\n".join(kept["note"]))


class _JobLog(Closing):
    """Reads a log in a thread, so that an interruption of this one is noticed at once."""

    def __init__(self, jobs: _Jobs, job: str) -> None:
        self._jobs = jobs
        self._job = job
        self._items: queue.SimpleQueue[str | JobState | Exception] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._reading: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="log of a job", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> str | JobState | Exception:
        """Returns the next part, "" for none in time; at last the end of the job, or an error."""
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def close(self) -> None:
        """Ends the connection."""
        self._is_closed.set()
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CLOSING_S)  # it may wait for an answer that will not come

    def _cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._read())
        except Exception as error:  # noqa: BLE001 - raised where the job is followed
            self._items.put(error)
        finally:
            self._loop.close()

    async def _read(self) -> None:
        """Passes the log on until the job has ended; a connection that breaks is made again."""
        limit_s = float(environment.read("peer_timeout_s"))
        heard_s = time.monotonic()
        while not self._is_closed.is_set():
            self._reading = self._loop.create_task(self._pass_on())
            try:
                await self._reading
                state = self._jobs.state(self._job)
                if state.has_ended:
                    self._items.put(state)
                    return
                heard_s = time.monotonic()
            except asyncio.CancelledError:
                return
            except UnavailableError as error:
                if self._is_there():
                    heard_s = time.monotonic()
                elif time.monotonic() - heard_s > limit_s:
                    raise self._lost(limit_s, error) from error
            self._is_closed.wait(_RETRY_S)
            # A line that was not complete ends: the log comes from its beginning.
            self._items.put("\n")

    def _is_there(self) -> bool:
        try:
            self._jobs.state(self._job)
        except UnavailableError:
            return False
        return True

    async def _pass_on(self) -> None:
        async for text in self._jobs.log(self._job):
            self._items.put(text)

    def _lost(self, limit_s: float, error: Exception) -> UnavailableError:
        return UnavailableError(
            explain(
                f"Nothing was heard of job {self._job} for {limit_s:g} s: {error}",
                expected="a leader that runs and is reached.",
                fix="look at it; STRATAGEM_PEER_TIMEOUT_S changes the limit.",
            )
        )

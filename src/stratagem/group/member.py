"""Membership of this process in a group: joining, exchanges, announcements, failures."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment, logs
from stratagem.errors import DeadlineExceededError, UnavailableError, explain
from stratagem.group.assignments import AssignmentNotes
from stratagem.group.authentication.connections import decode, encode
from stratagem.group.authentication.secret import Credentials
from stratagem.group.connection import Connection
from stratagem.group.current import Identity, print_stacks
from stratagem.group.hub import MAIN
from stratagem.group.verdict import Activity, GroupLimits, ProgramPosition, Verdict

# Announcements to all processes, delivered without waiting.

Listener = Callable[[int, list[int]], None]
"""Called with the id of the announcing process and its numbers."""


class Announcements:
    """Listeners by topic; announcements without one are stored, as others may be ahead."""

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._pending: dict[str, list[tuple[int, list[int]]]] = {}

    def deliver(self, message: dict[str, Any]) -> None:
        """Delivers the announcements of a message to their listeners, or stores them."""
        for topic, process_id, numbers in message["announcements"]:
            listener = self._listeners.get(topic)
            if listener is None:
                self._pending.setdefault(topic, []).append((process_id, numbers))
            else:
                listener(process_id, numbers)

    def listen(self, topic: str, listener: Listener) -> None:
        """Registers a topic's only listener, which must not block or raise."""
        self._listeners[topic] = listener
        for announcement in self._pending.pop(topic, []):
            listener(*announcement)


# Streams of value exchanges, from the side of one process.

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


_logger = logging.getLogger(__name__)

_FIRST_PROGRESS_S = 2.0
# Each poll for a result takes the core from the step for 60 us; rare polls see its end late. So the
# pause is this fraction of the time waited so far.
_MIN_PAUSE_S, _MAX_PAUSE_S, _PAUSE_FRACTION = 0.0002, 0.01, 0.02
_NOTIFY_LIMIT_S = 5.0


class Group:
    """The processes that train in lockstep, as seen from one of them. Joins on construction.

    Raises DeadlineExceededError, naming the missing processes, if some do not join in time;
    ValueError if the processes or their credentials differ, or the port is taken.
    """

    def __init__(
        self, identity: Identity, limits: GroupLimits, credentials: Credentials | None = None
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.own_address = ""
        self._position = ProgramPosition()
        self._position_lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._is_reported = False
        self._is_ready = _always
        self._changed = threading.Condition()
        self._num_missing, self._missing = 1, identity.labels[0]
        self._has_joined = False
        self._have_left = False
        self._is_leaving = False
        self._error: Exception | None = None
        self._connection = Connection(
            identity,
            limits,
            credentials or Credentials(),
            position=lambda: self._position,
            on_message=self._handle,
            on_lost=self._lose,
            on_error=self._fail_to_join,
        )
        self._streams = Streams(
            identity.label, self._changed, send=self._connection.send, check=self._check_in_thread
        )
        self._main = self._streams.open(MAIN)
        self._announcements = Announcements()
        self.assignments = AssignmentNotes()
        self._num_to_agree = 0
        self._begun = ProgramPosition()
        self._connection.start()
        try:
            self._join()
        except BaseException:
            if self._verdict is not None:  # late processes need the verdict, too
                self._connection.wait_until_all_notified(min(_NOTIFY_LIMIT_S, limits.join_s))
            self._connection.abandon()
            raise

    @property
    def num_processes(self) -> int:
        """Number of processes in the group."""
        return self.identity.num_processes

    @property
    def process_id(self) -> int:
        """Id of this process, from 0."""
        return self.identity.process_id

    @property
    def verdict(self) -> Verdict | None:
        """Reason why the group ended, or None while it works."""
        return self._verdict

    @property
    def is_reported(self) -> bool:
        """True if an error has reported the verdict to the program."""
        return self._is_reported

    @property
    def waits_in_vain(self) -> bool:
        """True if the group ended during a shared program, which has not finished since."""
        return self._verdict is not None and not self._is_ready()

    def wait_for_verdict(self) -> None:
        """Blocks until the group ends."""
        with self._changed:
            while self._verdict is None:
                self._changed.wait()

    def check(self) -> None:
        """Raises the error that ended the group, if any."""
        if self._verdict is not None:
            self.mark_reported()
            raise self._error_of(self._verdict)

    def _check_in_thread(self) -> None:
        """Like `check`, for a thread ahead of the program, which may wait inside JAX."""
        if self._verdict is not None:
            raise self._error_of(self._verdict)

    def mark_reported(self) -> None:
        """Records that the verdict, if any, is reported to the program, also for a launcher."""
        if self._verdict is None or self._is_reported:
            return
        self._is_reported = True
        loss = self._verdict.loss(self.identity.label)
        path = environment.lookup("STRATAGEM_LOSS_FILE")  # unset without a launcher
        if loss is not None and path is not None:
            # On a full disk the launcher blames this task, whose error names the lost one.
            with contextlib.suppress(OSError):
                part = Path(f"{path}.part")  # the launcher may kill this process at any time
                part.write_text(loss.to_json(), encoding="utf-8")
                part.replace(path)

    def _error_of(self, verdict: Verdict) -> Exception:
        here = f"This is {self.identity.label}, {self._position}."
        return Verdict(verdict.error, f"{verdict.message}\n{here}").exception()

    @contextlib.contextmanager
    def at(self, kind: Activity, name: str) -> Generator[None]:
        """Sets the activity of this process within a scope."""
        before = self._position
        self._set_position(kind, name, before.step)
        try:
            yield
        finally:
            self._set_position(before.kind, before.name, self._position.step)

    @property
    def num_steps(self) -> int:
        """Number of shared programs that this process has begun."""
        return self._position.step

    def begin_step(self) -> int:
        """Counts a shared program before it starts, and returns its number, from 1."""
        self.check()
        if self.assignments or self._num_to_agree:
            self._agree_on_assignments()
        position = self._begun = self._position
        self._set_position(position.kind, position.name, position.step + 1, position.calls + 1)
        return position.step + 1

    def return_to_step(self, number: int) -> None:
        """Resets the count of shared programs after failed or internal ones; 0 for none.

        To restart at 1, all processes call it right after an exchange.
        """
        position, begun = self._position, self._begun
        is_failed = (number, position.calls) == (begun.step, begun.calls + 1)
        calls = begun.calls if is_failed else position.calls
        self._set_position(position.kind, position.name, number, calls)

    def _agree_on_assignments(self) -> None:
        """Sends what was assigned; waits until all have sent what came before the last program.

        The answer arrives while that program runs.
        """
        if self._num_to_agree:
            with self.at(Activity.AGREEMENT, "assignments"), self._changed:
                while self._num_to_agree:
                    self.check()
                    self._changed.wait(1.0)
        self._send_assignments()

    def _send_assignments(self, *, is_last: bool = False) -> None:
        message = self.assignments.take(self._position.calls, is_last=is_last)
        if message is not None:
            with self._changed:
                self._num_to_agree += 1
            self._connection.send(message)

    def wait_for_step(self, number: int, name: str, is_ready: Callable[[], bool]) -> None:
        """Waits until the results of a shared program are ready; raises as `check`."""
        if is_ready():
            return
        started_at = time.monotonic()
        self._is_ready = is_ready
        with self.in_step(number, name):
            while not is_ready():
                self.check()
                waited_s = time.monotonic() - started_at
                time.sleep(min(max(_PAUSE_FRACTION * waited_s, _MIN_PAUSE_S), _MAX_PAUSE_S))
        self._is_ready = _always  # drops the results

    @contextlib.contextmanager
    def in_step(self, number: int, name: str) -> Generator[None]:
        """Marks this process as inside a shared program, where it may wait for others."""
        before = self._position
        self._set_position(Activity.STEP, name, number)
        try:
            yield
        finally:
            self._set_position(before.kind, before.name, before.step)

    def explain_loss(self, error: Exception) -> Exception:
        """Returns an error that names the lost process, for a transport error that does not.

        Waits up to the limit for an answer from all processes.
        """
        deadline = time.monotonic() + self.limits.peer_s
        with self._changed:
            while self._verdict is None and time.monotonic() < deadline:
                self._changed.wait(0.1)
        if self._verdict is not None:
            self.mark_reported()
            return self._error_of(self._verdict)
        return UnavailableError(
            explain(
                f"{self.identity.label} lost a connection to another process: {error}",
                expected="stable connections; all processes still answer the hub.",
                fix="check whether a firewall or a proxy closes connections between the hosts.",
                code="SG506",
            )
        )

    def exchange(
        self,
        name: str,
        value: object,
        *,
        timeout_s: float | None = None,
        setting: str = "STRATAGEM_BARRIER_TIMEOUT_S",
    ) -> list[Any]:
        """Sends a value to all processes and returns theirs, by process id. Call on every process.

        `name` is the same on all processes; `encode` lists the types of `value`. None for
        `timeout_s` means the barrier limit; messages name the `setting` that changes it. Raises
        DeadlineExceededError, naming the processes that did not join; RuntimeError if another
        process made a different call; UnavailableError if a process was lost.
        """
        limit_s = self.limits.barrier_s if timeout_s is None else timeout_s
        if self.assignments:
            self._send_assignments(is_last=True)
        with self.at(Activity.EXCHANGE, name):
            try:
                values = self._main.exchange(value, name=name, limit_s=limit_s, setting=setting)
            except Exception:
                self.mark_reported()
                raise
            position = self._position
            self._set_position(position.kind, position.name, position.step, position.calls + 1)
        assert values is not None  # this stream is never closed
        return values

    def stream(self, name: str) -> Stream:
        """Opens a separate stream of exchanges, for a thread ahead of the program.

        `name` is unique and the same on all processes. Each process closes its stream.
        """
        return self._streams.open(name)

    def announce(self, topic: str, numbers: Sequence[int]) -> None:
        """Sends numbers to all processes, this one included, without waiting; from any thread.

        All processes receive all announcements in the same order.
        """
        self._connection.send({"kind": "announce", "topic": topic, "numbers": list(numbers)})

    def listen(self, topic: str, listener: Listener) -> None:
        """Registers the listener of a topic, which also receives earlier announcements.

        It is called in the connection's thread and must not block or raise.
        """
        with self._changed:
            self._announcements.listen(topic, listener)

    def leave(self) -> bool:
        """Announces the end of this process and waits for all; False after a failure or timeout."""
        with self.at(Activity.EXIT, "exit"):
            self._is_leaving = True
            if self.assignments:
                self._send_assignments(is_last=True)
            self._connection.send({"kind": "gone"})
            deadline = time.monotonic() + self.limits.barrier_s
            with self._changed:
                while not self._have_left:
                    if self._verdict is not None or time.monotonic() > deadline:
                        return False
                    self._changed.wait(0.2)
        return True

    def report_error(self, text: str) -> None:
        """Sends the text of the error that ends this process to the others."""
        self._connection.send({"kind": "error", "text": text})

    def open_coordination_port(self) -> int:
        """Returns the port on 127.0.0.1 for JAX's coordination service."""
        return self._connection.open_coordination_port()

    def abandon(self) -> None:
        """Closes the connection without notice, like a crash."""
        self._connection.abandon()

    def drain(self, limit_s: float) -> None:
        """Waits until sent messages are written, at most `limit_s` seconds."""
        self._connection.drain(limit_s)

    def _join(self) -> None:
        started_at = time.monotonic()
        printed_at = started_at + _FIRST_PROGRESS_S
        with self._changed:
            while not self._has_joined:
                if self._error is not None:
                    raise self._error
                self.check()
                waited_s = time.monotonic() - started_at
                if waited_s > self.limits.join_s + 2.0:  # process 0, if reachable, raises first
                    raise self._join_timeout(waited_s)
                if time.monotonic() > printed_at:
                    logs.announce(_logger, self._progress(waited_s))
                    printed_at = time.monotonic() + min(max(waited_s, 2.0), 30.0)
                self._changed.wait(0.1)

    def _progress(self, waited_s: float) -> str:
        count = self.num_processes
        return (
            f"{self.identity.label}: {count - self._num_missing} of {count} joined, waiting for "
            f"{self._missing} for {waited_s:.0f} s"
        )

    def _join_timeout(self, waited_s: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            explain(
                f"{self.identity.label} waited {waited_s:.0f} s for {self._missing}.",
                expected=f"all processes within {self.limits.join_s:g} s "
                "(STRATAGEM_JOIN_TIMEOUT_S).",
                fix=f"check whether {self.identity.labels[0]} was started and can be reached "
                "from this host.",
                code="SG504",
            )
        )

    # Called by the connection's thread.

    def _fail_to_join(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        with self._changed:
            if kind in ("exchanged", "abandoned"):
                self._streams.deliver(message)
            elif kind == "announced":
                self._announcements.deliver(message)
            elif kind == "welcome":
                self._has_joined = True
                self.own_address = message["address"]
            elif kind == "progress":
                self._num_missing, self._missing = message["num_missing"], message["missing"]
            elif kind == "busy":
                leader = self.identity.labels[0]
                self._num_missing = self.num_processes
                self._missing = f"{leader}, which still runs with the workers of the start before,"
            elif kind == "agreed":
                self._num_to_agree -= message["count"]
            elif kind == "gone":
                self._have_left = True
            elif kind == "verdict" and self._verdict is None:
                fields = [field.name for field in dataclasses.fields(Verdict)]
                verdict = Verdict(**{name: message[name] for name in fields})
                # Not while joining, when all wait in the same place. Before the program knows of
                # the verdict, so that its error is not in between.
                if verdict.error == "DeadlineExceededError" and self._has_joined:
                    print_stacks(self.identity.label)
                self._verdict = verdict
            self._changed.notify_all()

    def _lose(self, how: str) -> None:
        """Ends the group because process 0 is lost, and with it the connection to all others."""
        with self._changed:
            if self._verdict is None and not (self._is_leaving and self._have_left):
                leader = self.identity.labels[0]
                self._verdict = Verdict(
                    "UnavailableError",
                    explain(
                        f"{leader} {how}. {self.identity.label} is {self._position}.",
                        expected="a heartbeat at least every "
                        f"{self.limits.peer_s:g} s (STRATAGEM_PEER_TIMEOUT_S).",
                        fix="check its log and the network between the two, then restart all "
                        "processes.",
                        code="SG506",
                    ),
                    lost=leader,
                    how=how.partition(":")[0],
                )
            self._changed.notify_all()

    def _set_position(self, kind: Activity, name: str, step: int, calls: int | None = None) -> None:
        with self._position_lock:
            before = self._position
            calls = before.calls if calls is None else calls
            self._position = ProgramPosition(kind, name, step, before.moves + 1, calls)


def _always() -> bool:
    return True

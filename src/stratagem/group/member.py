"""This process as a member of a group: it joins, exchanges values, and hears when it is over."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.announcements import Announcements, Listener
from stratagem.group.connection import Connection
from stratagem.group.identity import Identity
from stratagem.group.streams import Stream, Streams
from stratagem.group.verdict import Kind, Limits, Place, Verdict
from stratagem.messages import explain

__all__ = ["Group"]

_FIRST_NEWS_S = 2.0
# How often to look whether something is ready: short beside a step between processes, and seldom
# enough to leave the cores to it.
# Each look takes the core from the step for 60 us; looking rarely finds its end late. So the pause
# is this share of what was waited so far.
_LEAST_PAUSE_S, _MOST_PAUSE_S, _PAUSE_SHARE = 0.0002, 0.01, 0.02
_LAST_WORDS_S = 5.0


class Group:
    """The processes that train in lockstep, seen from one of them.

    Args:
        identity: which of them this is.
        limits: how long anything may take.

    Raises:
        DeadlineExceededError: not all came together in time; the message names who is missing.
        ValueError: the processes do not fit together, or the port is taken.
    """

    def __init__(self, identity: Identity, limits: Limits) -> None:
        self.identity = identity
        self.limits = limits
        self.own_address = ""
        self._place = Place()
        self._place_lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._is_told = False
        self._changed = threading.Condition()
        self._missing = [identity.labels[0]]
        self._has_joined = False
        self._left: list[bool] = [False] * identity.num_processes
        self._is_leaving = False
        self._error: Exception | None = None
        self._connection = Connection(
            identity,
            limits,
            place=lambda: self._place,
            on_message=self._take,
            on_lost=self._lose,
            on_error=self._fail_to_join,
        )
        self._streams = Streams(
            identity.label, self._changed, send=self._connection.send, check=self._check_beside
        )
        self._main = self._streams.open("main")
        self._announcements = Announcements()
        self._connection.start()
        try:
            self._join()
        except BaseException:
            if self._verdict is not None:  # who comes late would wait for nobody else
                self._connection.tell_everybody(min(_LAST_WORDS_S, limits.join_s))
            self._connection.abandon()
            raise

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.identity.num_processes

    @property
    def process_id(self) -> int:
        """The number of this process."""
        return self.identity.process_id

    @property
    def verdict(self) -> Verdict | None:
        """Why the group cannot go on; None while it can."""
        return self._verdict

    @property
    def is_told(self) -> bool:
        """Whether the program has been told the verdict, by an error."""
        return self._is_told

    def wait_for_verdict(self) -> None:
        """Waits until the group cannot go on; for ever if it can."""
        with self._changed:
            while self._verdict is None:
                self._changed.wait()

    def check(self) -> None:
        """Raises what ended the group, if anything did.

        Raises:
            UnavailableError: a process was lost. DeadlineExceededError: one is stuck.
            RuntimeError: the processes came apart.
        """
        if self._verdict is not None:
            self._is_told = True
            raise self._ended(self._verdict)

    def _check_beside(self) -> None:
        """As `check`, for a thread that is ahead of the program: that may wait inside JAX."""
        if self._verdict is not None:
            raise self._ended(self._verdict)

    def note_told(self) -> None:
        """Notes that an error that another thread has met reaches the program."""
        self._is_told |= self._verdict is not None

    def _ended(self, verdict: Verdict) -> Exception:
        here = f"This is {self.identity.label}, {self._place}."
        return Verdict(verdict.error, f"{verdict.message}\n{here}").exception()

    @contextlib.contextmanager
    def at(self, kind: Kind, name: str) -> Generator[None]:
        """Says what this process does meanwhile.

        Args:
            kind: what it does.
            name: with what.
        """
        before = self._place
        self._move(kind, name, before.step)
        try:
            yield
        finally:
            self._move(before.kind, before.name, self._place.step)

    @property
    def num_steps(self) -> int:
        """How many programs that all processes run together this one has begun."""
        return self._place.step

    def begin_step(self) -> int:
        """Counts a program that all processes run together, before this one starts it.

        Returns:
            Its number, from 1.
        """
        self.check()
        place = self._place
        self._move(place.kind, place.name, place.step + 1)
        return place.step + 1

    def return_to_step(self, number: int) -> None:
        """Counts on from a step: those after it were not started, or are not the program's.

        To count from 1 again, all processes call it right after an exchange of all.

        Args:
            number: of the step; 0 for none.
        """
        place = self._place
        self._move(place.kind, place.name, number)

    def wait_for_step(self, number: int, name: str, is_ready: Callable[[], bool]) -> None:
        """Waits for the results of a step.

        Args:
            number: of the step.
            name: of its program.
            is_ready: whether they are there.

        Raises:
            UnavailableError: a process was lost meanwhile; and what else `check` raises.
        """
        if is_ready():
            return
        started_at = time.monotonic()
        with self.in_step(number, name):
            while not is_ready():
                self.check()
                waited_s = time.monotonic() - started_at
                time.sleep(min(max(_PAUSE_SHARE * waited_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))

    @contextlib.contextmanager
    def in_step(self, number: int, name: str) -> Generator[None]:
        """Says that this process is in a program that all run, and may wait for the others there.

        Args:
            number: of the step.
            name: of its program.
        """
        before = self._place
        self._move(Kind.STEP, name, number)
        try:
            yield
        finally:
            self._move(before.kind, before.name, before.step)

    def explain_loss(self, error: Exception) -> Exception:
        """Returns what to raise instead of an error of the transport.

        Args:
            error: of the transport: it knows that a connection broke, and not whose.

        Returns:
            The error that names the process; within the limit for one that does not answer.
        """
        deadline = time.monotonic() + self.limits.peer_s
        with self._changed:
            while self._verdict is None and time.monotonic() < deadline:
                self._changed.wait(0.1)
        if self._verdict is not None:
            self._is_told = True
            return self._ended(self._verdict)
        return UnavailableError(
            explain(
                f"{self.identity.label} lost a connection to another process: {error}",
                expected="connections between all processes; each of them still answers.",
                fix="see whether a firewall or a proxy closes connections between the hosts.",
            )
        )

    def exchange(
        self,
        name: str,
        value: Any,
        *,
        timeout_s: float | None = None,
        setting: str = "STRATAGEM_BARRIER_TIMEOUT_S",
    ) -> list[Any]:
        """Hands a value to all processes and returns theirs. All have to call it.

        Args:
            name: of the place, the same on all.
            value: small; see `wire.encode` for what it may be.
            timeout_s: how long to wait for the others; None for the limit of barriers.
            setting: what changes that limit, for the message.

        Returns:
            The values of all processes, in their order.

        Raises:
            DeadlineExceededError: others did not come; the message names them.
            RuntimeError: another process is at another place.
            UnavailableError: one was lost.
        """
        limit_s = self.limits.barrier_s if timeout_s is None else timeout_s
        with self.at(Kind.EXCHANGE, name):
            try:
                told = self._main.exchange(value, place=name, limit_s=limit_s, setting=setting)
            except Exception:
                self.note_told()
                raise
        assert told is not None  # nobody closes this stream
        return told

    def stream(self, name: str) -> Stream:
        """Begins a stream of exchanges of its own, for a thread that is ahead of the program.

        Args:
            name: the same on all processes, and new; each process closes it.

        Returns:
            The stream.
        """
        return self._streams.open(name)

    def announce(self, topic: str, numbers: Sequence[int]) -> None:
        """Tells all processes something, this one too, without waiting; from any thread.

        All hear all announcements in one order.

        Args:
            topic: what it is about.
            numbers: what to say.
        """
        self._connection.send({"kind": "announce", "topic": topic, "numbers": list(numbers)})

    def listen(self, topic: str, listener: Listener) -> None:
        """Hears what any process announces, and what has been announced before.

        Args:
            topic: what it is about; one listener each.
            listener: called in the thread of the connection; it must neither wait nor raise.
        """
        with self._changed:
            self._announcements.listen(topic, listener)

    def leave(self) -> bool:
        """Says that this process has ended, and waits until all have.

        Returns:
            Whether all ended well; False where the group broke, or others stayed too long.
        """
        with self.at(Kind.EXIT, "exit"):
            self._is_leaving = True
            self._connection.send({"kind": "gone"})
            deadline = time.monotonic() + self.limits.barrier_s
            with self._changed:
                while not all(self._left):
                    if self._verdict is not None or time.monotonic() > deadline:
                        return False
                    self._changed.wait(0.2)
        return True

    def tell_error(self, text: str) -> None:
        """Tells the others that this process ends with an error.

        Args:
            text: of the error.
        """
        self._connection.send({"kind": "error", "text": text})

    def open_door(self) -> int:
        """Opens a way to JAX's coordination service.

        Returns:
            A port on 127.0.0.1; on process 0, where the service has to listen.
        """
        return self._connection.open_door()

    def abandon(self) -> None:
        """Closes the connection without a word, as a process does that dies."""
        self._connection.abandon()

    def drain(self, limit_s: float) -> None:
        """Waits until what was sent has gone out.

        Args:
            limit_s: how long at most.
        """
        self._connection.drain(limit_s)

    def _join(self) -> None:
        started_at = time.monotonic()
        told_at = started_at + _FIRST_NEWS_S
        with self._changed:
            while not self._has_joined:
                if self._error is not None:
                    raise self._error
                self.check()
                waited_s = time.monotonic() - started_at
                if waited_s > self.limits.join_s + 2.0:  # process 0 speaks first, if it is there
                    raise self._not_joined(waited_s)
                if time.monotonic() > told_at:
                    print(self._news(waited_s), file=sys.stderr, flush=True)
                    told_at = time.monotonic() + min(max(waited_s, 2.0), 30.0)
                self._changed.wait(0.1)

    def _news(self, waited_s: float) -> str:
        count = self.num_processes
        return (
            f"{self.identity.label}: {count - len(self._missing)} of {count} joined, waiting for "
            f"{', '.join(self._missing)} for {waited_s:.0f} s"
        )

    def _not_joined(self, waited_s: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            explain(
                f"{self.identity.label} waited {waited_s:.0f} s for {', '.join(self._missing)}.",
                expected=f"all processes within {self.limits.join_s:g} s "
                "(STRATAGEM_JOIN_TIMEOUT_S).",
                fix=f"see whether {self.identity.labels[0]} was started and can be reached from "
                "here.",
            )
        )

    # What the thread of the connection calls.

    def _fail_to_join(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        with self._changed:
            if kind in ("exchanged", "abandoned"):
                self._streams.take(message)
            elif kind == "announced":
                self._announcements.take(message)
            elif kind == "welcome":
                self._has_joined = True
                self.own_address = message["addresses"][self.process_id]
            elif kind == "progress":
                self._missing = message["missing"]
            elif kind == "gone":
                self._left = message["left"]
            elif kind == "verdict" and self._verdict is None:
                self._verdict = Verdict(
                    message["error"], message["message"], message["lost"], message["silent_s"]
                )
            self._changed.notify_all()

    def _lose(self, how: str) -> None:
        """Process 0 cannot be heard any more, and with it nobody else."""
        with self._changed:
            if self._verdict is None and not (self._is_leaving and all(self._left)):
                leader = self.identity.labels[0]
                self._verdict = Verdict(
                    "UnavailableError",
                    explain(
                        f"{leader} {how}. {self.identity.label} is {self._place}.",
                        expected="a sign of life at least every "
                        f"{self.limits.peer_s:g} s (STRATAGEM_PEER_TIMEOUT_S).",
                        fix="look at its own log, or at the network between the two, and start "
                        "all processes again.",
                    ),
                    lost=leader,
                )
            self._changed.notify_all()

    def _move(self, kind: Kind, name: str, step: int) -> None:
        with self._place_lock:
            self._place = Place(kind, name, step, self._place.moves + 1)

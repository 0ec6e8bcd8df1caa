"""Hub of a group on process 0: admits members, relays messages, detects failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from stratagem.cluster.addresses import is_loopback
from stratagem.errors import explain
from stratagem.group.assignments import Assignments
from stratagem.group.authentication.connections import (
    MAX_HELLO_BYTES,
    close_now,
    forward,
    frame,
    open_streams,
    read_message,
)
from stratagem.group.authentication.secret import Credentials
from stratagem.group.verdict import (
    Activity,
    GroupLimits,
    MemberView,
    ProgramPosition,
    Verdict,
    judge,
    named,
)

# Addresses at which the processes of a group reach each other.
#
# A process uses the address from which it reached process 0. On process 0's own host that may be a
# loopback address: 127.0.0.1, or 127.0.1.1, which Debian puts into /etc/hosts for the host's name.


@dataclasses.dataclass(frozen=True)
class Link:
    """Addresses of a connection between a process and process 0.

    `own` is the process as it sees itself, `source` the process as process 0 sees it, `reached`
    the address of process 0 to which it connected.
    """

    own: str
    source: str
    reached: str

    @staticmethod
    def of(own: str, writer: asyncio.StreamWriter) -> Link:
        """Returns the link of a connection that process 0 has accepted."""
        ends = [writer.get_extra_info(end)[0] for end in ("peername", "sockname")]
        # A dual-stack socket accepts IPv4 addresses with a prefix.
        return Link(own, *(address.removeprefix("::ffff:") for address in ends))


def reachable_addresses(links: Sequence[Link]) -> list[str]:
    """Returns the address at which each process listens for others.

    Processes that reached process 0 by loopback run on its host. They get the address by which the
    first process from another host reached it, if any.
    """
    outside = [link.reached for link in links if not is_loopback(link.reached)]
    return [
        outside[0] if outside and is_loopback(link.own) and is_loopback(link.source) else link.own
        for link in links
    ]


# Exchanges of values between all processes, collected and checked by process 0.


@dataclasses.dataclass(frozen=True)
class ExchangeReply:
    """A message to some processes, given by their ids."""

    to: list[int]
    message: dict[str, Any]


@dataclasses.dataclass
class _OpenExchange:
    """An exchange that some processes have not joined yet."""

    name: str
    opened_at: float
    limit_s: float | None
    setting: str
    values: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])


class Exchanges:
    """All open exchanges.

    Each belongs to a stream, which every process joins in the same order; comparing names verifies
    that. A stream is dropped when all processes have left it.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._open: dict[tuple[str, int], _OpenExchange] = {}
        self._left: dict[str, set[int]] = {}

    def add(
        self, process_id: int, message: dict[str, Any], now: float
    ) -> ExchangeReply | Verdict | None:
        """Adds the value of one process; `now` is in seconds.

        Returns a reply for the last value, or for one that others will not join; a Verdict for a
        value out of order; otherwise None.
        """
        key = (message["stream"], message["number"])
        if message["stream"] in self._left:
            return self._abandoned(key, [process_id])
        exchange = self._open.get(key)
        if exchange is None:
            exchange = _OpenExchange(message["name"], now, message["limit_s"], message["setting"])
            self._open[key] = exchange
        if exchange.name != message["name"]:
            return self._mismatch_verdict(process_id, message["name"], exchange)
        exchange.values[process_id] = message["value"]
        if len(exchange.values) < len(self._labels):
            return None
        del self._open[key]
        all_processes = list(range(len(self._labels)))
        runs = _runs([exchange.values[index] for index in all_processes])
        return ExchangeReply(
            all_processes, {"kind": "exchanged", "stream": key[0], "number": key[1], "runs": runs}
        )

    def leave(self, process_id: int, stream: str) -> list[ExchangeReply]:
        """Removes a process from a stream and returns replies for processes that wait there.

        Processes that read ahead may wait for more batches than the leaving program took; those it
        did take are complete.
        """
        left = self._left.setdefault(stream, set())
        left.add(process_id)
        replies: list[ExchangeReply] = []
        for key in [key for key in self._open if key[0] == stream]:
            waiting = self._open.pop(key).values.keys() - left
            replies.append(self._abandoned(key, sorted(waiting)))
        if len(left) == len(self._labels):
            del self._left[stream]
        return replies

    def _abandoned(self, key: tuple[str, int], to: list[int]) -> ExchangeReply:
        by = [self._labels[index] for index in sorted(self._left[key[0]])]
        return ExchangeReply(
            to, {"kind": "abandoned", "stream": key[0], "number": key[1], "by": by}
        )

    def _mismatch_verdict(self, process_id: int, name: str, exchange: _OpenExchange) -> Verdict:
        first = self._labels[next(iter(exchange.values))]
        return Verdict(
            "RuntimeError",
            explain(
                f"{self._labels[process_id]} called {name!r} while {first} called "
                f"{exchange.name!r}.",
                expected="the same calls in the same order on every process.",
                fix="find where their programs differ: a condition on the process, a loop of "
                "another length, a call that only the chief makes.",
                code="SG507",
            ),
        )

    def overdue(
        self, views: Sequence[MemberView], limits: GroupLimits, now: float
    ) -> Verdict | None:
        """Returns a verdict if a process has waited too long for others, or None."""
        for exchange in self._open.values():
            waited_s = now - exchange.opened_at
            missing = [i for i in range(len(self._labels)) if i not in exchange.values]
            if exchange.limit_s is None:  # input: other processes may read ahead
                waits = [
                    views[i].position.kind is Activity.INPUT and views[i].unmoved_s > limits.stuck_s
                    for i in exchange.values
                ]
                busy = [
                    views[i].position.kind in (Activity.INPUT, Activity.PYTHON) for i in missing
                ]
                if any(waits) and any(busy):
                    return self._timeout_verdict(exchange, missing, views, waited_s, limits.stuck_s)
            elif 0 < exchange.limit_s < waited_s:
                return self._timeout_verdict(exchange, missing, views, waited_s, exchange.limit_s)
        return None

    def _timeout_verdict(
        self,
        exchange: _OpenExchange,
        missing: list[int],
        views: Sequence[MemberView],
        waited_s: float,
        limit_s: float,
    ) -> Verdict:
        names = named([f"{views[i].label} ({views[i].position})" for i in missing])
        arrived = named([views[i].label for i in exchange.values])
        return Verdict(
            "DeadlineExceededError",
            explain(
                f"{arrived} waited {waited_s:.0f} s at {exchange.name!r} for {names}.",
                expected=f"all processes to call it within {limit_s:g} s ({exchange.setting}).",
                fix="check what the missing process does, or raise the limit if it may take "
                "that long.",
                code="SG508",
            ),
        )


def _runs(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """Returns each value with the number of successive processes that sent it.

    Most exchanges are barriers or checks for equality, so that an answer to n processes has few
    values instead of n.
    """
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and _is_same(value, runs[-1][0]):
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def _is_same(value: Any, other: Any) -> bool:
    """True for equal JSON; in Python, 1, 1.0 and True are equal."""
    if type(value) is not type(other) or value != other:
        return False
    return (
        value is None
        or isinstance(value, bool | int | str)
        or (json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True))
    )


_JUDGE_INTERVAL_S = 0.25
MEMBER, TUNNEL = "member", "tunnel"
"""First words of claims; the second is the process id."""
MAIN = "main"
"""The stream of exchanges of the programs themselves."""
# A process that is started again may connect before its earlier connections are noticed as lost.
_CONNECTIONS_PER_MEMBER = 8


@dataclasses.dataclass
class _Member:
    """State of one process."""

    label: str
    writer: asyncio.StreamWriter | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    link: Link | None = None
    received_at: float = 0.0
    position: ProgramPosition = dataclasses.field(default_factory=ProgramPosition)
    moved_at: float = 0.0
    error_text: str | None = None
    has_left: bool = False

    def update_position(self, position: ProgramPosition) -> None:
        if position != self.position:
            self.position, self.moved_at = position, self.received_at

    def view(self, now: float) -> MemberView:
        return MemberView(
            label=self.label,
            position=self.position,
            silent_s=now - self.received_at,
            unmoved_s=now - self.moved_at,
            is_connected=self.writer is not None,
            error_text=self.error_text,
            has_left=self.has_left,
        )


class Hub:
    """Meeting point of a group, in a thread of process 0.

    `labels` name all processes in messages, by process id. `service_port` is the port of JAX's
    coordination service on this host. A connection must say hello within `hello_s`.
    """

    def __init__(
        self,
        labels: list[str],
        limits: GroupLimits,
        service_port: int,
        credentials: Credentials,
        hello_s: float,
    ) -> None:
        self._members = [_Member(label) for label in labels]
        self._limits = limits
        self._service_port = service_port
        self._credentials = credentials
        self._hello_s = hello_s
        self._num_connections = 0
        self._is_closed = False
        self._exchanges = Exchanges(labels)
        self._assignments = Assignments(labels)
        self._absent = dict.fromkeys(range(len(labels)))
        self._num_left = 0
        self._same: dict[str, tuple[Any, str]] = {}  # value and the label of the first process
        self._announced: list[tuple[str, int, list[int]]] = []
        self._is_complete = False
        self._verdict: Verdict | None = None
        self._notified = set[int]()
        self._started_at = time.monotonic()
        self._tasks = set[asyncio.Task[Any]]()

    def start(self) -> None:
        """Starts judging the members."""
        self._hold_reference(asyncio.create_task(self._judge_periodically()))

    def serve(self, connection: socket.socket, claim: str) -> None:
        """Serves a connection that the gate has admitted."""
        is_full = self._num_connections >= _CONNECTIONS_PER_MEMBER * len(self._members)
        if is_full or self._is_closed:
            connection.close()
            return
        self._num_connections += 1
        self._hold_reference(asyncio.create_task(self._serve(connection, claim)))

    def close(self) -> None:
        """Closes all connections without notice."""
        self._is_closed = True
        for member in self._members:
            if member.writer is not None:
                close_now(member.writer)

    def _hold_reference(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, claim: str) -> None:
        writer: asyncio.StreamWriter | None = None
        role, _, number = claim.partition(" ")
        # Besides OSError, the hub may close; asyncio would log each connection as an error then.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                async with asyncio.timeout(self._hello_s):
                    reader, writer = await open_streams(
                        connection, self._credentials, is_server=True
                    )
                    hello = await read_message(reader, MAX_HELLO_BYTES) if role == MEMBER else {}
                if role == TUNNEL:
                    await forward(reader, writer, self._service_port)
                elif hello.get("kind") == "hello" and str(hello["process_id"]) == number:
                    await self._serve_member(hello, reader, writer)
            finally:
                self._num_connections -= 1
                connection.close() if writer is None else close_now(writer)

    async def _serve_member(
        self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._is_complete and hello["restart"]:
            # The launcher of another node was the first to see that this group is lost.
            writer.write(frame({"kind": "busy"}))
            await writer.drain()
            return
        refusal = self._refusal(hello)
        if refusal is None and self._verdict is None:
            self._compare(hello)
        if self._verdict is not None or refusal is not None:
            verdict = self._verdict or Verdict("ValueError", str(refusal))
            writer.write(frame({"kind": "verdict", **dataclasses.asdict(verdict)}))
            await writer.drain()
            self._notified.add(hello["process_id"])
            return
        member = self._members[hello["process_id"]]
        now = time.monotonic()
        member.writer, member.facts = writer, hello["facts"]
        self._absent.pop(hello["process_id"])
        member.link = Link.of(hello["facts"]["address"], writer)
        member.received_at = member.moved_at = now
        self._welcome_if_complete()
        try:
            while True:
                self._handle(hello["process_id"], await read_message(reader))
        finally:
            member.writer = None
            self._absent[hello["process_id"]] = None
            if not member.has_left:
                self._judge()

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        """Returns the reason to refuse a process, or None."""
        count, process_id = len(self._members), hello["process_id"]
        if hello["num_processes"] != count or not 0 <= process_id < count:
            return explain(
                f"Process {process_id} of {hello['num_processes']} asked to join a group of "
                f"{count}.",
                expected=f"process 0 to {count - 1} of {count}.",
                fix="give every process the same cluster (TF_CONFIG).",
                code="SG505",
            )
        member = self._members[process_id]
        if member.writer is not None:
            return explain(
                f"{member.label} has joined already, from host {member.facts.get('host')}, "
                f"process {member.facts.get('pid')}.",
                expected="one process per task.",
                fix="give each process its own task index, and stop processes of earlier runs.",
                code="SG505",
            )
        return None

    def _compare(self, hello: dict[str, Any]) -> None:
        """Ends the group if a process differs from the others."""
        label = self._members[hello["process_id"]].label
        for name, value in hello["facts"]["same"].items():
            theirs, other = self._same.setdefault(name, (value, label))
            if theirs != value:
                difference = explain(
                    f"{label} has {name} {value}, but {other} has {theirs}.",
                    expected=f"the same {name} on every process.",
                    fix="start all processes with the same configuration and environment.",
                    code="SG505",
                )
                self._fail(Verdict("ValueError", difference))
                return

    def _welcome_if_complete(self) -> None:
        if self._is_complete or self._absent:
            return
        self._is_complete = True
        links = [member.link for member in self._members if member.link is not None]
        for member, address in zip(self._members, reachable_addresses(links), strict=True):
            self._send([member], {"kind": "welcome", "address": address})

    def _missing(self) -> list[str]:
        return [self._members[index].label for index in sorted(self._absent)]

    def _handle(self, process_id: int, message: dict[str, Any]) -> None:
        member = self._members[process_id]
        now = time.monotonic()
        member.received_at = now
        kind = message["kind"]
        if kind == "beat":
            member.update_position(
                ProgramPosition(
                    Activity(message["position"]),
                    message["name"],
                    message["step"],
                    message["moves"],
                    message["calls"],
                )
            )
            self._fail_if(self._assignments.move(process_id, message["calls"]))
        elif kind == "assigned":
            num_equal, verdict = self._assignments.add(process_id, message)
            if num_equal:
                self._send_all({"kind": "agreed", "count": num_equal})
            self._fail_if(verdict)
        elif kind == "exchange":
            outcome = self._exchanges.add(process_id, message, now)
            if isinstance(outcome, ExchangeReply) and message["stream"] == MAIN:
                outcome = self._assignments.settle() or outcome
            if isinstance(outcome, Verdict):
                self._fail(outcome)
            elif outcome is not None:
                self._reply(outcome)
        elif kind == "leave":
            for reply in self._exchanges.leave(process_id, message["stream"]):
                self._reply(reply)
        elif kind == "announce":
            self._announce(process_id, message)
        elif kind == "error":
            member.error_text = message["text"]
            self._judge()
        elif kind == "gone":
            self._note_gone(member)

    def _note_gone(self, member: _Member) -> None:
        self._num_left += not member.has_left
        member.has_left = True
        if self._num_left == len(self._members):
            self._fail_if(self._assignments.settle())
        if self._num_left == len(self._members) and self._verdict is None:
            self._send_all({"kind": "gone"})

    def _announce(self, process_id: int, message: dict[str, Any]) -> None:
        """Sends an announcement to all, together with others that arrive at the same time.

        All processes answer some announcements at once, and each answer is for all.
        """
        if not self._announced:
            asyncio.get_running_loop().call_soon(self._send_announced)
        self._announced.append((message["topic"], process_id, message["numbers"]))

    def _send_announced(self) -> None:
        announced, self._announced = self._announced, []
        if announced:
            self._write(self._members, {"kind": "announced", "announcements": announced})

    async def _judge_periodically(self) -> None:
        sent_at = 0.0
        while self._verdict is None:
            await asyncio.sleep(_JUDGE_INTERVAL_S)
            self._judge()
            now = time.monotonic()
            if now - sent_at > 1.0:
                sent_at = now
                self._send_all({"kind": "beat"})
                if not self._is_complete:
                    missing = self._missing()
                    progress = {"num_missing": len(missing), "missing": named(missing)}
                    self._send_all({"kind": "progress", **progress})

    def _judge(self) -> None:
        if self._verdict is not None:
            return
        now = time.monotonic()
        if not self._is_complete:
            if now - self._started_at > self._limits.join_s:
                self._fail(self._not_joined(now - self._started_at))
            return
        views = [member.view(now) for member in self._members]
        verdict = judge(views, self._limits) or self._exchanges.overdue(views, self._limits, now)
        if verdict is not None:
            self._fail(verdict)

    def _not_joined(self, waited_s: float) -> Verdict:
        missing = self._missing()
        joined = len(self._members) - len(missing)
        return Verdict(
            "DeadlineExceededError",
            explain(
                f"{joined} of {len(self._members)} joined within {waited_s:.0f} s; "
                f"{named(missing)} did not.",
                expected=f"all processes within {self._limits.join_s:g} s "
                "(STRATAGEM_JOIN_TIMEOUT_S).",
                fix="check their logs: were they started, and can they reach "
                f"{self._members[0].label}?",
                code="SG504",
            ),
        )

    def _fail_if(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self._fail(verdict)

    def _fail(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self._send_all({"kind": "verdict", **dataclasses.asdict(verdict)})
            self._notified.update(i for i, m in enumerate(self._members) if m.writer is not None)

    async def wait_until_all_notified(self) -> None:
        """Waits until every process has received the verdict, including late ones."""
        while len(self._notified) < len(self._members):
            await asyncio.sleep(_JUDGE_INTERVAL_S)

    def _reply(self, reply: ExchangeReply) -> None:
        self._send([self._members[index] for index in reply.to], reply.message)

    def _send_all(self, message: dict[str, Any]) -> None:
        self._send(self._members, message)

    def _send(self, members: list[_Member], message: dict[str, Any]) -> None:
        self._send_announced()  # these came first
        self._write(members, message)

    def _write(self, members: list[_Member], message: dict[str, Any]) -> None:
        data = frame(message)
        for member in members:
            if member.writer is not None:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    member.writer.write(data)

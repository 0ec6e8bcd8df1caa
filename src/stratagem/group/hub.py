"""What process 0 does for a group: it lets the others in, hands values around, and judges."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

from stratagem.group.addresses import Link, reachable_addresses
from stratagem.group.exchanges import Answer, Exchanges
from stratagem.group.protocol import read_message
from stratagem.group.tunnel import forward
from stratagem.group.verdict import Kind, Limits, MemberView, Place, Verdict, judge
from stratagem.group.wire import frame
from stratagem.messages import explain

__all__ = ["Hub"]

_JUDGE_EVERY_S = 0.25


@dataclasses.dataclass
class _Member:
    """What the hub knows of one process."""

    label: str
    writer: asyncio.StreamWriter | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    link: Link | None = None
    heard_at: float = 0.0
    place: Place = dataclasses.field(default_factory=Place)
    moved_at: float = 0.0
    parting: str | None = None
    has_left: bool = False

    def see_at(self, place: Place) -> None:
        if place != self.place:
            self.place, self.moved_at = place, self.heard_at

    def view(self, now: float) -> MemberView:
        return MemberView(
            label=self.label,
            place=self.place,
            silent_s=now - self.heard_at,
            unmoved_s=now - self.moved_at,
            is_connected=self.writer is not None,
            parting=self.parting,
            has_left=self.has_left,
        )


class Hub:
    """The meeting point of a group, in a thread of process 0.

    Args:
        labels: the names of all processes in messages, by their number.
        limits: how long anything may take.
        service_port: where JAX's coordination service of this host will listen.
    """

    def __init__(self, labels: list[str], limits: Limits, service_port: int) -> None:
        self._members = [_Member(label) for label in labels]
        self._limits = limits
        self._service_port = service_port
        self._exchanges = Exchanges(labels)
        self._is_complete = False
        self._verdict: Verdict | None = None
        self._told = set[int]()
        self._started_at = time.monotonic()
        self._tasks = set[asyncio.Task[Any]]()
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> None:
        """Begins to listen, on all addresses of this host.

        Args:
            port: where.

        Raises:
            OSError: it is taken.
        """
        self._server = await asyncio.start_server(self._serve, host=None, port=port)
        self._keep(asyncio.create_task(self._judge_for_ever()))

    def close(self) -> None:
        """Ends all connections, without a word."""
        if self._server is not None:
            self._server.close()
        for member in self._members:
            if member.writer is not None:
                member.writer.close()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await read_message(reader)
            if hello["kind"] == "tunnel":
                await forward(reader, writer, self._service_port)
            elif hello["kind"] == "hello":
                await self._serve_member(hello, reader, writer)
        except OSError:
            pass  # a stranger, or a process that has gone; the judge sees which is missing
        except asyncio.CancelledError:
            pass  # the hub closes; asyncio would else log each connection as an error
        finally:
            writer.close()

    async def _serve_member(
        self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        refusal = self._refusal(hello)
        if refusal is None and self._verdict is None:
            self._compare(hello)
        if self._verdict is not None or refusal is not None:
            verdict = self._verdict or Verdict("ValueError", str(refusal))
            writer.write(frame({"kind": "verdict", **dataclasses.asdict(verdict)}))
            await writer.drain()
            self._told.add(hello["process_id"])
            return
        member = self._members[hello["process_id"]]
        now = time.monotonic()
        member.writer, member.facts = writer, hello["facts"]
        member.link = Link.of(hello["facts"]["address"], writer)
        member.heard_at = member.moved_at = now
        self._complete()
        try:
            while True:
                self._take(hello["process_id"], await read_message(reader))
        finally:
            member.writer = None
            self._judge()

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        """Why a process cannot be one of this group; None if it can."""
        count, process_id = len(self._members), hello["process_id"]
        if hello["num_processes"] != count or not 0 <= process_id < count:
            return explain(
                f"Process {process_id} of {hello['num_processes']} asked to join a group of "
                f"{count}.",
                expected=f"process 0 to {count - 1} of {count}.",
                fix="give every process the same cluster (TF_CONFIG).",
            )
        member = self._members[process_id]
        if member.writer is not None:
            return explain(
                f"{member.label} has joined already, from host {member.facts.get('host')}, "
                f"process {member.facts.get('pid')}.",
                expected="one process for each task.",
                fix="give each process its own task index, and end processes of former runs.",
            )
        return None

    def _compare(self, hello: dict[str, Any]) -> None:
        """Ends the group where this process is unlike the others."""
        member = self._members[hello["process_id"]]
        for name, value in hello["facts"]["same"].items():
            for other in self._members:
                theirs = other.facts.get("same", {}).get(name, value)
                if theirs != value:
                    difference = explain(
                        f"{member.label} has {name} {value}, and {other.label} has {theirs}.",
                        expected="the same on every process.",
                        fix="start all processes with one configuration and one environment.",
                    )
                    self._fail(Verdict("ValueError", difference))
                    return

    def _complete(self) -> None:
        if self._is_complete or any(member.writer is None for member in self._members):
            self._tell_progress()
            return
        self._is_complete = True
        links = [member.link for member in self._members if member.link is not None]
        self._send_all({"kind": "welcome", "addresses": reachable_addresses(links)})

    def _tell_progress(self) -> None:
        missing = [member.label for member in self._members if member.writer is None]
        self._send_all({"kind": "progress", "missing": missing})

    def _take(self, process_id: int, message: dict[str, Any]) -> None:
        member = self._members[process_id]
        now = time.monotonic()
        member.heard_at = now
        kind = message["kind"]
        if kind == "beat":
            member.see_at(
                Place(Kind(message["place"]), message["name"], message["step"], message["moves"])
            )
        elif kind == "exchange":
            outcome = self._exchanges.add(process_id, message, now)
            if isinstance(outcome, Verdict):
                self._fail(outcome)
            elif outcome is not None:
                self._answer(outcome)
        elif kind == "leave":
            for answer in self._exchanges.leave(process_id, message["stream"]):
                self._answer(answer)
        elif kind == "announce":
            told = {"topic": message["topic"], "numbers": message["numbers"]}
            self._send_all({"kind": "announced", "process_id": process_id, **told})
        elif kind == "error":
            member.parting = message["text"]
            self._judge()
        elif kind == "gone":
            member.has_left = True
            self._send_all({"kind": "gone", "left": [m.has_left for m in self._members]})

    async def _judge_for_ever(self) -> None:
        last_told = 0.0
        while self._verdict is None:
            await asyncio.sleep(_JUDGE_EVERY_S)
            self._judge()
            now = time.monotonic()
            if now - last_told > 1.0:
                last_told = now
                self._send_all({"kind": "beat"})
                if not self._is_complete:
                    self._tell_progress()

    def _judge(self) -> None:
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
        missing = [member.label for member in self._members if member.writer is None]
        joined = len(self._members) - len(missing)
        return Verdict(
            "DeadlineExceededError",
            explain(
                f"{joined} of {len(self._members)} joined within {waited_s:.0f} s; "
                f"{', '.join(missing)} did not.",
                expected=f"all processes within {self._limits.join_s:g} s "
                "(STRATAGEM_JOIN_TIMEOUT_S).",
                fix="see in their logs whether they were started, and whether they can reach "
                f"{self._members[0].label}.",
            ),
        )

    def _fail(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self._send_all({"kind": "verdict", **dataclasses.asdict(verdict)})
            self._told.update(i for i, m in enumerate(self._members) if m.writer is not None)

    async def tell_everybody(self) -> None:
        """Waits until every process has heard why the group ended, also those that come late."""
        while len(self._told) < len(self._members):
            await asyncio.sleep(_JUDGE_EVERY_S)

    def _answer(self, answer: Answer) -> None:
        self._send([self._members[index] for index in answer.to], answer.message)

    def _send_all(self, message: dict[str, Any]) -> None:
        self._send(self._members, message)

    def _send(self, members: list[_Member], message: dict[str, Any]) -> None:
        data = frame(message)
        for member in members:
            if member.writer is not None:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    member.writer.write(data)

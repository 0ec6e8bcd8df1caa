"""Surveyor: the order of a survey, with agents in the tasks of a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stratagem.cli.doctor.network.agent import Agent, Reason, close_writer, detect_loss
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost, SurveySettings
from stratagem.group.authentication.connections import frame, read_frame

# JAX is started for the facts; the doctor gives it two minutes.
_FACTS_LIMIT_S = 180.0
_SLACK_S = 10.0


class Member(Protocol):
    """An agent that carries out orders."""

    free_port: int

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer; raises OSError if the agent is gone."""
        ...

    async def end(self, report: Mapping[str, Any]) -> None:
        """Sends the report and releases the agent."""
        ...


class LocalMember:
    """The agent of this process."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.free_port = agent.free_port

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out the order here."""
        return await self._agent.carry_out(order)

    async def end(self, report: Mapping[str, Any]) -> None:
        """Does nothing: this process has the report."""


class RemoteMember:
    """An agent at the other end of a connection."""

    def __init__(
        self, free_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.free_port = free_port
        self._reader = reader
        self._writer = writer

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Sends the order, and waits for the answer."""
        self._writer.write(frame(order))
        return await read_frame(self._reader)

    async def end(self, report: Mapping[str, Any]) -> None:
        """Sends the report, and closes the connection."""
        self._writer.write(frame({"kind": "end", "survey": report}))
        await asyncio.wait_for(close_writer(self._writer), _SLACK_S)


class Surveyor:
    """Leader of a survey.

    Args:
        survey: to be filled; hosts without a member are absent in it.
        members: agents that have joined, by index.
        limit_s: seconds that agents wait for a connection.
        transfer_s: seconds of each transfer; 0 for none.
        note: called with a description of each step.
    """

    def __init__(
        self,
        survey: Survey,
        members: Mapping[int, Member],
        *,
        limit_s: float,
        transfer_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._survey = survey
        self._members = dict(members)
        self._limit_s = limit_s
        self._transfer_s = transfer_s
        self._note = note

    async def run(self) -> Survey:
        """Returns the survey; hosts that stop answering are left out from then on."""
        self._survey.reference = min(self._members, default=0)
        self._note("versions and devices of all hosts")
        for index, answer in (await self._ask_all({"kind": "facts"}, _FACTS_LIMIT_S)).items():
            self._survey.facts[index] = answer.get("facts", {})
        self._note("connections between all hosts")
        await self._connect()
        pairs = [(one, other) for one in self._members for other in self._members if one != other]
        for number, (one, other) in enumerate(pairs, 1):
            names = self._survey.names
            self._note(f"pair {number} of {len(pairs)}: {names[one]} to {names[other]}")
            await self._measure(one, other)
        for one, other in self._survey.slow_pairs():  # perhaps only just then
            self._note(f"again: {self._survey.names[one]} to {self._survey.names[other]}")
            await self._measure(one, other)
        first = self._survey.reference
        self._survey.offset_s[first] = self._survey.uncertainty_s[first] = 0.0
        return self._survey

    async def _connect(self) -> None:
        survey = self._survey
        size = len(survey.hosts)
        ports = [
            self._members[index].free_port if index in self._members else None
            for index in range(size)
        ]
        # Each host tries the others at once; a lookup, a connection and an answer may each wait.
        answers = await self._ask_all({"kind": "reach", "ports": ports}, 4 * self._limit_s)
        places: dict[int, set[str]] = {index: set() for index in range(size)}
        for index, answer in answers.items():
            reach = answer.get("reach", {"cluster": [None] * size, "free": [None] * size})
            survey.cluster[index] = [one and tuple(one) for one in reach["cluster"]]
            survey.free[index] = [one and tuple(one) for one in reach["free"]]
            for to in range(size):
                for tried in (survey.cluster[index][to], survey.free[index][to]):
                    places[to] |= {tried[1]} if tried and tried[1] else set[str]()
        for index in list(self._members):
            order = {"kind": "owns", "places": sorted(places[index])}
            answer = await self._ask(index, order, self._limit_s)
            survey.owned[index] = answer.get("owns", {})
            survey.own_address[index] = answer.get("own_address", "")

    async def _measure(self, one: int, other: int) -> None:
        survey, port = self._survey, self._port_between(one, other)
        if port is None or one not in self._members:
            return
        order = {"kind": "echo", "to": other, "port": port}
        echo = await self._ask_pair(one, other, order, 20 * self._limit_s)
        survey.round_trip_s[one][other] = echo.get("round_trip_s")
        if one == survey.reference and "offset_s" in echo:
            survey.offset_s[other] = echo["offset_s"]
            survey.uncertainty_s[other] = echo["uncertainty_s"]
        elif other == survey.reference and survey.offset_s[one] is None and "offset_s" in echo:
            survey.offset_s[one] = -echo["offset_s"]
            survey.uncertainty_s[one] = echo["uncertainty_s"]
        if self._transfer_s and echo.get("round_trip_s") is not None:
            order = {**order, "kind": "transfer", "duration_s": self._transfer_s}
            sent = await self._ask_pair(one, other, order, 3 * self._limit_s + self._transfer_s)
            rates = (survey.bytes_per_s[one][other], sent.get("bytes_per_s"))
            survey.bytes_per_s[one][other] = max(filter(None, rates), default=None)

    def _port_between(self, one: int, other: int) -> int | None:
        """Returns a port at which an agent answered the other one."""
        for attempts, port in (
            (self._survey.free, self._members[other].free_port if other in self._members else None),
            (self._survey.cluster, self._survey.hosts[other].port),
        ):
            tried = attempts[one][other]
            if tried is not None and tried[0] == Reason.REACHED:
                return port
        return None

    async def _ask_all(self, order: dict[str, Any], limit_s: float) -> dict[int, dict[str, Any]]:
        indices = list(self._members)
        answers = await asyncio.gather(*(self._ask(index, order, limit_s) for index in indices))
        return dict(zip(indices, answers, strict=True))

    async def _ask(self, index: int, order: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if index not in self._members:
            return {}
        limit_s += _SLACK_S
        try:
            return await asyncio.wait_for(self._members[index].ask(order), limit_s)
        except TimeoutError:
            reason = f"stopped answering: no result of {order['kind']!r} within {limit_s:g} s"
        except OSError as error:
            reason = f"stopped answering during {order['kind']!r}: {error}"
        del self._members[index]
        self._survey.absent[index] = reason
        return {}

    async def _ask_pair(
        self, one: int, other: int, order: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        answer = await self._ask(one, order, limit_s)
        if "error" in answer:
            names = self._survey.names
            self._survey.failures.append(
                f"{order['kind']} from {names[one]} to {names[other]}: {answer['error']}"
            )
        return answer


# Survey by the tasks of a cluster: each host runs the command, and the first task leads.


_RETRY_S = 0.5

Facts = Callable[[], Mapping[str, Any]]


async def survey_as_task(
    hosts: Sequence[SurveyedHost], index: int, gather_facts: Facts, settings: SurveySettings
) -> Survey:
    """Leads the survey on the first host, and joins it on others; returns the same survey on all.

    Args:
        hosts: all tasks.
        index: index of this one.
        gather_facts: called for the facts about this machine, in a thread.
        settings: limits.
    """
    if index == 0:
        return await _Leader(hosts, gather_facts, settings).run()
    agent = Agent(hosts, index, settings.limit_s, gather_facts)
    await agent.start()
    try:
        return await _join(agent, hosts, settings)
    finally:
        await agent.close()


class _Leader:
    """Agent of the first host, which admits the others and orders them."""

    def __init__(
        self, hosts: Sequence[SurveyedHost], gather_facts: Facts, settings: SurveySettings
    ) -> None:
        self._settings = settings
        self._survey = Survey(list(hosts))
        self._members: dict[int, Member] = {}
        self._changed = asyncio.Event()
        self._agent = Agent(hosts, 0, settings.limit_s, gather_facts, self._admit)

    async def run(self) -> Survey:
        """Waits for the others, leads the survey, and sends it to them."""
        await self._agent.start()
        self._members[0] = LocalMember(self._agent)
        try:
            if self._agent.has_cluster_port:
                await self._wait_for_all()
            self._note_absent()
            surveyor = Surveyor(
                self._survey,
                dict(sorted(self._members.items())),
                limit_s=self._settings.limit_s,
                transfer_s=self._settings.transfer_s,
                note=self._settings.note,
            )
            survey = await surveyor.run()
            ends = (member.end(survey.as_dict()) for member in self._members.values())
            await asyncio.gather(*ends, return_exceptions=True)
            return survey
        finally:
            await self._agent.close()

    def _admit(
        self, message: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        hosts, index = self._survey.hosts, int(message["index"])
        theirs = [SurveyedHost(**host) for host in message["hosts"]]
        where = writer.get_extra_info("peername")[0].removeprefix("::ffff:")
        if theirs != hosts or not 0 < index < len(hosts):
            listed = ", ".join(f"{host.address}:{host.port}" for host in theirs[:8])
            name = theirs[index].name if 0 <= index < len(theirs) else f"Task {index}"
            problem = f"{name} at {where} describes another cluster: {listed}"
        elif index in self._members:
            problem = f"A second task at {where} is {hosts[index].name}, too"
        else:
            self._members[index] = RemoteMember(int(message["port"]), reader, writer)
            self._changed.set()
            return
        self._survey.rejected.append(problem)
        report = {**self._survey.as_dict(), "rejected": [problem]}
        writer.write(frame({"kind": "end", "survey": report}))
        writer.close()

    async def _wait_for_all(self) -> None:
        begin_s, wait_s = time.monotonic(), self._settings.wait_s
        while missing := self._missing():
            waited_s = time.monotonic() - begin_s
            if waited_s >= wait_s:
                return
            names = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
            self._settings.note(f"{waited_s:.0f} of {wait_s:g} s: waiting for {names}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(1.0, wait_s - waited_s))
            except TimeoutError:
                continue

    def _missing(self) -> list[str]:
        return [h.name for i, h in enumerate(self._survey.hosts) if i not in self._members]

    def _note_absent(self) -> None:
        reason = f"did not answer within {self._settings.wait_s:g} s"
        if not self._agent.has_cluster_port:
            reason = f"was not asked: {self._survey.names[0]} cannot listen at its address"
        for index in range(len(self._survey.hosts)):
            if index not in self._members:
                self._survey.absent[index] = reason


async def _join(agent: Agent, hosts: Sequence[SurveyedHost], settings: SurveySettings) -> Survey:
    """Joins the leader, and obeys it until it has the survey."""
    leader, begin_s = hosts[0], time.monotonic()
    described = [dataclasses.asdict(host) for host in hosts]
    join = {"kind": "join", "index": agent.index, "port": agent.free_port, "hosts": described}
    reason = ""
    while (waited_s := time.monotonic() - begin_s) < settings.wait_s:
        settings.note(f"{waited_s:.0f} of {settings.wait_s:g} s: connecting to {leader.name}")
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(leader.address, leader.port), settings.limit_s
            )
        except OSError as error:
            reason = str(error) or f"no connection within {settings.limit_s:g} s"
            await asyncio.sleep(_RETRY_S)
            continue

        async def send(message: dict[str, Any], to: asyncio.StreamWriter = writer) -> None:
            to.write(frame(message))
            await to.drain()

        settings.note(f"connected: {leader.name} leads")
        try:
            detect_loss(writer)
            await send(join)
            end = await agent.obey(reader, send)
        finally:  # also if this host is interrupted
            writer.close()
        await close_writer(writer)
        if end is not None:
            return Survey.from_dict(end["survey"])
        reason = "it closed the connection before the end"
        break
    return await _alone(agent, hosts, f"did not answer within {settings.wait_s:g} s ({reason})")


async def _alone(agent: Agent, hosts: Sequence[SurveyedHost], reason: str) -> Survey:
    """Returns the view of a host without a leader: facts, and the hosts it reaches."""
    survey = Survey(list(hosts), absent={0: reason})
    survey.facts[agent.index] = (await agent.carry_out({"kind": "facts"})).get("facts", {})
    answer = await agent.carry_out({"kind": "reach", "ports": [None] * len(hosts)})
    for to, tried in enumerate(answer.get("reach", {}).get("cluster", [])):
        if tried and tried[0] != Reason.REFUSED:  # hosts without a listener refuse
            survey.cluster[agent.index][to] = (str(tried[0]), tried[1])
    return survey

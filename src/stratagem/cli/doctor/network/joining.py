"""Survey by the tasks of a cluster: each host runs the command, and the first task leads."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.cli.doctor.network.agent import Agent
from stratagem.cli.doctor.network.probes import Reason, close_writer, detect_loss
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost, SurveySettings
from stratagem.cli.doctor.network.surveyor import LocalMember, Member, RemoteMember, Surveyor
from stratagem.group.protocol import frame

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

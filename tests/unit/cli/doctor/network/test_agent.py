"""Agents of two hosts on one machine: orders, invalid ones, and ports that are taken."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from stratagem.cli.doctor.network import probes
from stratagem.cli.doctor.network.agent import Agent, listen
from stratagem.cli.doctor.network.probes import Reason
from stratagem.cli.doctor.network.survey import SurveyedHost
from stratagem.group.protocol import frame
from tests.unit.observe.run_events.test_wait_clock import ticking


def _agent(hosts: list[SurveyedHost], index: int) -> Agent:
    return Agent(hosts, index, 120.0, lambda: {"versions": {"jax": str(index)}})


async def _answers_of_first(*orders: dict[str, Any]) -> list[dict[str, Any]]:
    hosts = [SurveyedHost("a", "127.0.0.1"), SurveyedHost("b", "127.0.0.1")]
    agents = [_agent(hosts, 0), _agent(hosts, 1)]
    for agent in agents:
        await agent.start()
    ports = {"port": agents[1].free_port, "ports": [one.free_port for one in agents]}
    answers = [await agents[0].carry_out({**ports, **order}) for order in orders]
    for agent in agents:
        await agent.close()
    return answers


def test_orders_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "time", ticking())
    facts, reach, owns, echo, sent = asyncio.run(
        _answers_of_first(
            {"kind": "facts"},
            {"kind": "reach"},
            {"kind": "owns", "places": ["127.0.0.1", "192.0.2.1"]},
            {"kind": "echo", "to": 1},
            {"kind": "transfer", "to": 1, "duration_s": 0.02},
        )
    )
    assert facts == {"facts": {"versions": {"jax": "0"}}}
    assert reach == {
        "reach": {"cluster": [None, None], "free": [None, (Reason.REACHED, "127.0.0.1")]}
    }
    assert owns == {
        "owns": {"127.0.0.1": True, "192.0.2.1": False},
        "own_address": "127.0.0.1",
    }
    assert echo["round_trip_s"] > 0
    assert sent["bytes_per_s"] > 0


@pytest.mark.parametrize(
    "order",
    [
        {"kind": "reboot"},
        {"kind": "owns"},
        {"kind": "transfer", "to": 1, "duration_s": "long"},
        {"kind": "echo", "to": 1, "port": 70000},
    ],
    ids=["unknown", "incomplete", "wrong type", "no port"],
)
def test_invalid_order_is_answered_by_its_error(order: dict[str, Any]) -> None:
    (answer,) = asyncio.run(_answers_of_first(order))
    assert list(answer) == ["error"]


def test_port_of_the_cluster_is_used_if_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]

        async def started(port: int) -> bool:
            agent = _agent(
                [SurveyedHost("a", "127.0.0.1", port), SurveyedHost("b", "127.0.0.1")], 0
            )
            await agent.start()
            await agent.close()
            return agent.has_cluster_port

        assert not asyncio.run(started(taken))
    assert asyncio.run(started(taken))


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", frame({"kind": "receive"}), b""])
def test_foreign_connection_is_closed(text: bytes) -> None:
    async def connect() -> bytes:
        agent = _agent([SurveyedHost("a", "127.0.0.1"), SurveyedHost("b", "127.0.0.1")], 0)
        await agent.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.free_port)
        writer.write(text)
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        await agent.close()
        return received

    assert asyncio.run(connect()) == b""


def test_listener_accepts_both_versions_of_ip() -> None:
    with listen("", 0) as listener:
        for address in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((address, listener.getsockname()[1]), 5).close()

"""Attempts, round trips and transfers on this machine, and each reason for a failure."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stratagem.cli.doctor.network import agent as module
from stratagem.cli.doctor.network.agent import (
    Agent,
    Reason,
    answer_echo,
    attempt,
    close_writer,
    detect_loss,
    listen,
    measure_echo,
    measure_transfer,
)
from stratagem.cli.doctor.network.survey import SurveyedHost
from stratagem.group.authentication.connections import frame, read_frame
from tests.unit.observe.test_wait_clock import ticking

_LIMIT_S = 120.0


@asynccontextmanager
async def _serving(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[int]:
    """The port of a server, whose connections have ended after the block."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        # The tasks of its connections, for which Python 3.11 does not wait.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_LIMIT_S)


@asynccontextmanager
async def _answering(answer: bytes = b"") -> AsyncIterator[int]:
    """A port that answers each message."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_frame(reader)
                writer.write(answer)
        except OSError:
            writer.close()

    async with _serving(serve) as port:
        yield port


async def _attempt_with(answer: bytes, expected: int | None) -> Reason:
    async with _answering(answer) as port:
        return (await attempt("127.0.0.1", port, _LIMIT_S, expected))[0]


@pytest.mark.parametrize(
    ("answer", "expected", "reason"),
    [
        (answer_echo(3), 3, Reason.REACHED),
        (answer_echo(3), None, Reason.REACHED),
        (answer_echo(4), 3, Reason.WRONG_HOST),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 3, Reason.SILENT),
        (b"\x00\x00\x00\x02{}", 3, Reason.SILENT),
    ],
    ids=["the agent", "any answer", "another agent", "another program", "another message"],
)
def test_who_answers_is_seen(answer: bytes, expected: int | None, reason: Reason) -> None:
    assert asyncio.run(_attempt_with(answer, expected)) is reason


def test_name_without_an_address_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:  # a machine without a network asks for long
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = asyncio.run(attempt("no-such-host.invalid", 1, _LIMIT_S))
    assert found == (Reason.UNKNOWN_NAME, "")


def test_full_backlog_times_out() -> None:
    """Linux drops further connections to a listener that accepts none."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        reason, _ = asyncio.run(attempt("127.0.0.1", port, 0.2))
        for one in waiting:
            one.close()
    assert reason is Reason.TIMEOUT


@pytest.mark.parametrize("offset_s", [0.0, -75.0])
def test_offset_of_the_other_clock_is_within_its_uncertainty(
    offset_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answering side reads a clock that is off; the machine's own one is the reference."""
    clock = ticking()
    monkeypatch.setattr(module, "time", clock)
    true = clock.time

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                await read_frame(reader)
            except OSError:
                break
            clock.time = lambda: true() + offset_s
            writer.write(answer_echo(1))
            clock.time = true
        writer.close()

    async def measure() -> dict[str, float]:
        async with _serving(serve) as port:
            return await measure_echo("127.0.0.1", port, _LIMIT_S, 5)

    found = asyncio.run(measure())
    assert abs(found["offset_s"] - offset_s) <= found["uncertainty_s"] + 1e-6
    assert 0 < 2 * found["uncertainty_s"] <= found["round_trip_s"]


def test_silent_host_ends_a_transfer() -> None:
    async def measure() -> None:
        never = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await never.wait()
            writer.close()

        async with _serving(serve) as port:
            with pytest.raises(TimeoutError):
                await measure_transfer("127.0.0.1", port, 0.1, 0.01)
            never.set()

    asyncio.run(measure())


def test_lost_host_is_detected_by_the_kernel() -> None:
    async def options() -> tuple[int, int]:
        async with _answering() as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            detect_loss(writer)
            connection = writer.get_extra_info("socket")
            found = (
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            )
            await close_writer(writer)
            return found

    is_on, idle_s = asyncio.run(options())
    assert is_on
    assert idle_s == 10


# Agents of two hosts on one machine: orders, invalid ones, and ports that are taken.


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
    monkeypatch.setattr(module, "time", ticking())
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

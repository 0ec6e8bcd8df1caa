"""The agent's program on pipes: greeting, orders, and its end with the leader."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import IO, Any

import pytest

from stratagem.cli.doctor.network.agent_program import MARKER
from stratagem.group.protocol import frame, read_frame

pytestmark = pytest.mark.slow

_HOSTS = [{"name": name, "address": "127.0.0.1", "port": None, "login": ""} for name in ("a", "b")]


def _message(stream: IO[bytes]) -> dict[str, Any]:
    async def parse() -> dict[str, Any]:
        reader = asyncio.StreamReader()
        head = stream.read(4)
        reader.feed_data(head + stream.read(int.from_bytes(head, "big")))
        return await read_frame(reader)

    return asyncio.run(parse())


@pytest.mark.parametrize("has_end", [True, False], ids=["end", "lost leader"])
def test_orders_are_answered_until_the_end(has_end: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "stratagem.cli.doctor.network.agent_program"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(len(MARKER)) == MARKER
        process.stdin.write(frame({"hosts": _HOSTS, "index": 0, "limit_s": 5.0}))
        process.stdin.write(frame({"kind": "owns", "places": ["127.0.0.1"]}))
        process.stdin.flush()
        assert _message(process.stdout)["port"] > 0
        assert _message(process.stdout)["owns"] == {"127.0.0.1": True}
        if has_end:
            process.stdin.write(frame({"kind": "end"}))
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(120) == 0

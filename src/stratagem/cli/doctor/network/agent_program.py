"""Agent on a host, with the leader at the other end of stdin and stdout.

`python -m stratagem.cli.doctor.network.agent_program`, as `stratagem doctor --hosts` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from stratagem.cli.doctor.accelerators import counted_devices, probe_devices
from stratagem.cli.doctor.clusters import check_own_address
from stratagem.cli.doctor.examination import examine
from stratagem.cli.doctor.network.agent import Agent
from stratagem.cli.doctor.network.survey import SurveyedHost
from stratagem.cli.doctor.settings import Finding, Level
from stratagem.cli.doctor.versions import installed_versions
from stratagem.cluster.addresses import join_address
from stratagem.group.authentication.connections import frame, read_frame

# Facts about this machine that a survey compares between hosts.


# Packages that must be equal on all hosts.
COMPARED = ("stratagem", "jax", "jaxlib", "keras")


def gather_facts(made_before: Sequence[Finding] = ()) -> dict[str, Any]:
    """Returns versions, devices, and the warnings and errors of `stratagem doctor`.

    Args:
        made_before: findings about this host's address, made before an agent listened there.
    """
    probe = probe_devices()
    findings = [*made_before, *examine(probe=probe, has_cluster=False)]
    problems = [one for one in findings if one.level in (Level.WARNING, Level.ERROR)]
    return {
        "versions": {"Python": platform.python_version(), **installed_versions(COMPARED)},
        "devices": ", ".join(counted_devices(probe.devices)) or "none",
        "findings": [dataclasses.asdict(one) for one in problems],
    }


# Agent on a host, with the leader at the other end of stdin and stdout.
#
# `python -m stratagem.cli.doctor.network.agent_program`, as `stratagem doctor --hosts` starts it.


# Written first, after whatever the login shell prints.
MARKER = b"\nSTRATAGEM-DOCTOR-AGENT\n"
_STREAM_BYTES = 2**22
_LONGEST_S = 3600.0


def main() -> None:
    """Runs the agent until its orders end."""
    # Prints of libraries must not disturb the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(_run(output))


async def _run(output: Any) -> None:
    async def send(message: dict[str, Any]) -> None:
        output.write(frame(message))
        output.flush()

    output.write(MARKER)
    output.flush()
    reader = asyncio.StreamReader(limit=_STREAM_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    begin = await read_frame(reader)
    hosts = [SurveyedHost(**host) for host in begin["hosts"]]
    own = hosts[begin["index"]]
    address = None if own.port is None else join_address(own.address, own.port)
    made = [] if address is None else check_own_address(address)
    agent = Agent(hosts, begin["index"], begin["limit_s"], lambda: gather_facts(made))
    await agent.start()
    await send({"port": agent.free_port})
    with contextlib.suppress(TimeoutError):  # the leader's host may be lost without notice
        await asyncio.wait_for(agent.obey(reader, send), _LONGEST_S)
    await agent.close()


if __name__ == "__main__":
    main()

"""Survey from one terminal: an agent on each host, started with `ssh`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import shlex
import signal
import tempfile
from collections.abc import Sequence
from typing import IO

from stratagem.cli.doctor.network.agent_program import MARKER
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost, SurveySettings
from stratagem.cli.doctor.network.surveyor import Member, RemoteMember, Surveyor
from stratagem.group.protocol import frame, read_frame

_MODULE = "stratagem.cli.doctor.network.agent_program"
_STREAM_BYTES = 2**22
_END_S = 5.0


async def survey_over_ssh(
    hosts: Sequence[SurveyedHost], *, ssh: str, python: str, settings: SurveySettings
) -> Survey:
    """Starts an agent on each host, and returns their survey.

    Args:
        hosts: all hosts.
        ssh: `ssh` with its options.
        python: interpreter on the hosts, as a shell command.
        settings: limits.
    """
    survey, members = Survey(list(hosts)), dict[int, Member]()
    async with contextlib.AsyncExitStack() as stack:
        settings.note(f"starting agents on {', '.join(survey.names)}")
        agents: list[_SshAgent] = []
        for host in hosts:
            agents.append(_SshAgent(host, ssh, python, settings, stack.enter_context(_file())))
            stack.push_async_callback(agents[-1].close)
        started = await asyncio.gather(
            *(agent.start(hosts, index) for index, agent in enumerate(agents))
        )
        for index, outcome in enumerate(started):
            if isinstance(outcome, str):
                survey.absent[index] = outcome
            else:
                members[index] = outcome
        surveyor = Surveyor(
            survey,
            members,
            limit_s=settings.limit_s,
            transfer_s=settings.transfer_s,
            note=settings.note,
        )
        await surveyor.run()
        ends = (member.end({}) for member in members.values())
        await asyncio.gather(*ends, return_exceptions=True)
    return survey


def _file() -> contextlib.AbstractContextManager[IO[bytes]]:
    """Returns a file for errors: a pipe that is not read would fill, and block the agent."""
    return tempfile.TemporaryFile()


class _SshAgent:
    """Process of `ssh` that runs an agent."""

    def __init__(
        self, host: SurveyedHost, ssh: str, python: str, settings: SurveySettings, errors: IO[bytes]
    ) -> None:
        self._host = host
        self._settings = settings
        self._command = [
            *shlex.split(ssh),
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={math.ceil(settings.wait_s)}"),
            *(host.login, f"{python} -m {_MODULE}"),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._errors = errors
        self._has_joined = False

    async def start(self, hosts: Sequence[SurveyedHost], index: int) -> Member | str:
        """Returns the agent, or the reason for its absence."""
        wait_s = self._settings.wait_s
        try:
            return await asyncio.wait_for(self._start(hosts, index), wait_s)
        except TimeoutError:
            return f"did not answer within {wait_s:g} s"
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            return f"runs no agent: {await self._reason(error)}"

    async def _start(self, hosts: Sequence[SurveyedHost], index: int) -> Member:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=_STREAM_BYTES,
            start_new_session=True,  # Ctrl-C ends it through `close`
        )
        reader, writer = self._process.stdout, self._process.stdin
        assert reader is not None
        assert writer is not None
        await reader.readuntil(MARKER)  # what shells print comes before
        described = [dataclasses.asdict(host) for host in hosts]
        begin = {"hosts": described, "index": index, "limit_s": self._settings.limit_s}
        writer.write(frame(begin))
        hello = await read_frame(reader)
        self._has_joined = True
        return RemoteMember(int(hello["port"]), reader, writer)

    async def _reason(self, error: Exception) -> str:
        """Returns the last line that `ssh` or Python wrote, else how it ended."""
        end = str(error)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                end = f"ssh ended with {await asyncio.wait_for(self._process.wait(), _END_S)}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), end)

    async def close(self) -> None:
        """Ends the process; an agent that has joined has time to end by itself."""
        if self._process is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S if self._has_joined else 0.0)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with a ProxyCommand
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)

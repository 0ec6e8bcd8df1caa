"""Agents started by a stand-in for `ssh` that runs the command here, and its failures.

`tests/unit/cli/test_doctor_cluster.py` uses the real one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from stratagem.cli.doctor.network.agent_program import MARKER
from stratagem.cli.doctor.network.survey import Survey, SurveySettings, parse_hosts
from stratagem.cli.doctor.network.surveyor import survey_over_ssh
from stratagem.group.authentication.connections import frame, read_frame

pytestmark = pytest.mark.slow

_HOSTS = parse_hosts("127.0.0.1,me@127.0.0.2")
# Its last argument is the command, the one before that the destination.
_STAND_IN = """#!/bin/sh
for last; do :; done
case "$*" in
  *me@*) {failure} ;;
esac
echo "Welcome to this host"
exec sh -c "$last"
"""


def _survey(
    folder: Path, failure: str, python: str = sys.executable, wait_s: float = 30.0
) -> Survey:
    program = folder / "ssh"
    program.write_text(_STAND_IN.format(failure=failure or ":"))
    program.chmod(0o755)
    settings = SurveySettings(wait_s=wait_s, transfer_s=0.01)
    over_ssh = survey_over_ssh(_HOSTS, ssh=f"{program} -v", python=python, settings=settings)
    return asyncio.run(over_ssh)


def test_hosts_are_measured_in_spite_of_a_greeting(tmp_path: Path) -> None:
    survey = _survey(tmp_path, "")
    assert survey.absent == {}
    assert survey.bytes_per_s[0][1] is not None
    assert survey.bytes_per_s[1][0] is not None
    assert {one["versions"]["Python"] for one in survey.facts.values()} == {
        ".".join(map(str, sys.version_info[:3]))
    }


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (
            "echo 'me@127.0.0.2: Permission denied (publickey).' >&2; exit 255",
            "runs no agent: me@127.0.0.2: Permission denied (publickey).",
        ),
        ("exit 1", "runs no agent: ssh ended with 1"),
        ("sleep 60", "did not answer within 10 s"),
    ],
    ids=["refused", "no reason", "silent"],
)
def test_host_without_an_agent_is_absent(failure: str, reason: str, tmp_path: Path) -> None:
    survey = _survey(tmp_path, failure, wait_s=10.0)
    assert list(survey.absent) == [1]
    assert survey.absent[1].startswith(reason)
    assert list(survey.facts) == [0]


def test_interpreter_without_stratagem_is_named(tmp_path: Path) -> None:
    python = f"env -u PYTHONPATH {sys.executable} -S"
    survey = _survey(tmp_path, "", python)
    assert "No module named 'stratagem'" in survey.absent[0]


def test_missing_ssh_is_named(tmp_path: Path) -> None:
    settings = SurveySettings(wait_s=5.0)
    over_ssh = survey_over_ssh(
        _HOSTS, ssh=str(tmp_path / "missing"), python="python3", settings=settings
    )
    survey = asyncio.run(over_ssh)
    assert "No such file" in survey.absent[0]
    assert os.fspath(tmp_path) in survey.absent[1]


# The agent's program on pipes: greeting, orders, and its end with the leader.

_HOSTS_OF_AGENT_PROGRAM = [
    {"name": name, "address": "127.0.0.1", "port": None, "login": ""} for name in ("a", "b")
]


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
        process.stdin.write(frame({"hosts": _HOSTS_OF_AGENT_PROGRAM, "index": 0, "limit_s": 5.0}))
        process.stdin.write(frame({"kind": "owns", "places": ["127.0.0.1"]}))
        process.stdin.flush()
        assert _message(process.stdout)["port"] > 0
        assert _message(process.stdout)["owns"] == {"127.0.0.1": True}
        if has_end:
            process.stdin.write(frame({"kind": "end"}))
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(120) == 0

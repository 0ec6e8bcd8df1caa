"""Agents started by a stand-in for `ssh` that runs the command here, and its failures.

`tests/unit/cli/test_doctor_cluster.py` uses the real one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from stratagem.cli.doctor.network.ssh import survey_over_ssh
from stratagem.cli.doctor.network.survey import Survey, SurveySettings, parse_hosts

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

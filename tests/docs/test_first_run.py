"""The script of the first page prints in two processes what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.programs import environment

_PAGE = (Path(__file__).parents[2] / "docs" / "start" / "first_run.md").read_text(encoding="utf-8")
_LAUNCH = (sys.executable, "-c", "from stratagem.cli import main; main()")


def _shown() -> dict[str, list[str]]:
    """The commands of the page, and the lines below each, in any order of the workers."""
    (block,) = re.findall(r"^```text\n(\$ .*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ stratagem (.*)\n((?:\[.*\n)+)", block, re.MULTILINE)
    return {command: sorted(lines.splitlines()) for command, lines in commands}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=() if index == 0 else pytest.mark.slow)
        for index, command in enumerate(_shown())
    ],
)
def test_command_prints_what_the_page_shows(command: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```py\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    result = subprocess.run(
        (*_LAUNCH, *command.split()),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == _shown()[command]


def test_page_has_two_commands() -> None:
    assert len(_shown()) == 2

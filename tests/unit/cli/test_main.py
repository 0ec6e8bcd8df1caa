"""The root of the `stratagem` command: help, version, and unknown commands."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import stratagem
from stratagem.cli import main
from tests.command_runner import CliRunner

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command_with_its_line(option) -> None:
    result = CliRunner().invoke(main, [option])
    assert result.exit_code == 0
    for name, command in main.commands.items():
        assert f"  {name}" in result.output
        assert command.get_short_help_str(100) in result.output


def test_version_is_that_of_the_project() -> None:
    version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"stratagem, version {version}\n"
    assert stratagem.__version__ == version


def test_unknown_command_is_named_with_exit_code_2() -> None:
    result = CliRunner().invoke(main, ["device"])
    assert result.exit_code == 2
    assert "No such command 'device'" in result.stderr

"""`stratagem completion`: scripts of the shells, and what they complete."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from stratagem.cli import main
from tests.command_runner import CliRunner

RUNNER = CliRunner()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_that_of_the_shell(shell) -> None:
    result = RUNNER.invoke(main, ["completion", shell])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"_STRATAGEM_COMPLETE={shell}_complete" in result.stdout


def test_other_shell_is_refused() -> None:
    result = RUNNER.invoke(main, ["completion", "csh"])
    assert result.exit_code == 2
    assert "'csh' is not one of" in result.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_accepts_the_script() -> None:
    script = RUNNER.invoke(main, ["completion", "bash"]).stdout
    checked = f"{script}\ncomplete -p stratagem"
    finished = subprocess.run(
        ["bash", "-c", checked], capture_output=True, text=True, check=True, timeout=60
    )
    assert "_stratagem_completion" in finished.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("stratagem dev", ["devices"]),
        ("stratagem kubernetes ren", ["render"]),
        ("stratagem launch --max-", ["--max-restarts", "--max-workers", "--max-evictions"]),
        ("stratagem launch --show ", ["all", "leader"]),
        ("stratagem explain sg20", [f"SG20{number}" for number in range(1, 9)]),
        ("stratagem completion z", ["zsh"]),
    ],
)
def test_commands_options_and_values_are_completed(typed, completed) -> None:
    variables = {
        "_STRATAGEM_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    result = RUNNER.invoke(main, [], env=variables, prog_name="stratagem")
    assert [line.partition(",")[2] for line in result.stdout.splitlines()] == completed

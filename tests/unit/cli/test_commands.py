"""Habits of all commands: verbosity, JSON, suggestions, colors, Ctrl-C."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator

import click
import pytest
from click.testing import Result

from stratagem import errors as exit_codes
from stratagem.cli import main
from stratagem.cli.commands import Commands, chosen_log_level, json_option, print_json, suggestion
from tests.command_runner import CliRunner
from tests.unit.test_logs import root_handlers


@click.group(cls=Commands)
def example() -> None:
    """Commands of these tests."""


@example.command()
@click.argument("action", default="log")
@json_option
def act(action: str, *, as_json: bool) -> None:
    """Log, warn, fail or be interrupted."""
    if action == "log":
        logging.getLogger("stratagem.cli.example").info("progress")
        warnings.warn("a warning", RuntimeWarning, stacklevel=1)
        if as_json:
            print_json({"level": chosen_log_level()})
    elif action == "fail":
        try:
            raise LookupError("no run")
        except LookupError as error:
            raise click.ClickException("The run is missing.") from error
    else:
        raise KeyboardInterrupt


def _call(*arguments: str) -> Result:
    with root_handlers(), warnings.catch_warnings():
        warnings.simplefilter("always")
        return CliRunner().invoke(example, ["act", *arguments])


def leaves(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, (*prefix, name))
        else:
            yield (*prefix, name)


@pytest.mark.parametrize("words", list(leaves(main)), ids=" ".join)
def test_every_command_takes_both_options(words) -> None:
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0
    for option in ("-v, --verbose", "-q, --quiet"):
        assert result.output.count(option) == 1


@pytest.mark.parametrize("words", list(leaves(main)), ids=" ".join)
def test_option_without_its_last_letter_gets_a_suggestion(words) -> None:
    result = CliRunner().invoke(main, [*words, "--quiett"])
    if words != ("plan",):  # its unknown options are the script's
        assert result.exit_code == exit_codes.USAGE
        _, named, suggested = result.stderr.partition("--quiett")
        assert named
        assert re.search(r"--quiet\b", suggested)


def test_progress_is_shown_with_v_and_warnings_are_hidden_with_q() -> None:
    assert "progress" not in _call().stderr
    assert "INFO progress" in _call("-v").stderr
    assert "INFO progress" in _call("-vv").stderr
    assert _call("-q").stderr == ""


def test_level_ends_with_the_command() -> None:
    assert [json.loads(_call("--json", *one).stdout)["level"] for one in (["-vv"], ["-q"], [])] == [
        "debug",
        "error",
        None,
    ]


def test_both_options_contradict_each_other() -> None:
    result = _call("-v", "-q")
    assert result.exit_code == exit_codes.USAGE
    assert "-v and -q contradict each other" in result.stderr


def test_cause_of_an_error_is_shown_with_v() -> None:
    assert _call("fail").stderr == "Error: The run is missing.\n"
    result = _call("fail", "-v")
    assert result.exit_code == exit_codes.FAILURE
    assert "LookupError: no run" in result.stderr
    assert result.stderr.endswith("Error: The run is missing.\n")


def test_interrupt_exits_as_shells_do() -> None:
    result = _call("interrupt")
    assert (result.exit_code, result.stderr) == (exit_codes.INTERRUPTED, "Interrupted.\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["device"], "devices"), (["goodpit"], "goodput"), (["slurm", "rendre"], "render")],
)
def test_misspelled_command_gets_a_suggestion(words, meant) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == exit_codes.USAGE
    assert f"No such command {words[-1]!r}. Did you mean {meant!r}?" in result.stderr


def test_name_that_is_like_no_other_gets_none() -> None:
    assert suggestion("xyzzy", ["plan", "test"]) == ""
    result = CliRunner().invoke(main, ["xyzzy"])
    assert "No such command 'xyzzy'.\n" in result.stderr


@pytest.mark.parametrize(
    ("variables", "is_styled", "is_colored"),
    [
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1"}, False, False),
    ],
)
def test_colors_are_those_that_the_environment_asks_for(variables, is_styled, is_colored) -> None:
    env = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color", **variables}
    result = CliRunner().invoke(main, ["explain", "SG204"], env=env, color=True)
    assert ("\x1b[" in result.stdout) is (is_styled and is_colored)
    result = CliRunner().invoke(main, ["config", "--show"], env=env, color=True)
    assert ("\x1b[" in result.stdout) is is_styled


@pytest.mark.parametrize(
    "words",
    [
        ["devices", "--json"],
        ["explain", "--json"],
        ["explain", "--json", "SG204"],
        ["config", "--show", "--json"],
        ["config", "--schema"],
        ["kubernetes", "validate", "--json"],
    ],
    ids=" ".join,
)
def test_stdout_is_json_and_nothing_else(words) -> None:
    manifest = CliRunner().invoke(main, ["kubernetes", "render"]).stdout
    result = CliRunner().invoke(main, words, input=manifest)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)


@pytest.mark.slow  # starts JAX in a process of its own
def test_env_is_json() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "stratagem", "env", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    values = json.loads(finished.stdout)
    assert values["devices"]
    assert values["versions"]["keras"]

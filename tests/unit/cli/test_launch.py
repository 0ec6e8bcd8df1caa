"""`stratagem launch`: options from the command line and the environment."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import click
import pytest

from stratagem.cli import main
from stratagem.cli.scripts import launch_command
from stratagem.launch import functions as scripts
from stratagem.launch.options import LaunchOptions
from stratagem.launch.restart.launcher import Outcome
from stratagem.launch.tasks.exit_status import ExitStatus
from tests.command_runner import CliRunner

PAGE = Path(__file__).parents[3] / "docs" / "clusters" / "launch.md"
OPTIONS = {
    parameter.name: parameter
    for parameter in launch_command.params
    if isinstance(parameter, click.Option) and parameter.name not in ("module", "quiet", "verbose")
}
# For each option: a value on the command line, and what it means.
VALUES = {
    "workers": ("3", 3),
    "chief": (None, True),
    "ps": ("2", 2),
    "evaluator": (None, True),
    "input_workers": ("4", 4),
    "devices_per_worker": ("4", 4),
    "max_restarts": ("5", 5),
    "max_preemptions": ("3", 3),
    "min_workers": ("1", 1),
    "max_workers": ("4", 4),
    "rejoin_after_s": ("30", 30.0),
    "cold_restarts": (None, True),
    "survivors": (None, True),
    "log_dir": ("logs", "logs"),
    "run_dir": ("runs/digits", "runs/digits"),
    "show": ("leader", "leader"),
    "grace_s": ("1.5", 1.5),
    "evaluator_grace_s": ("0", 0.0),
    "log_level": ("info", "info"),
    "nnodes": ("2", 2),
    "node_rank": ("1", 1),
    "coordinator": ("a:29400", "a:29400"),
}
ONE_OF_EACH_KIND = (
    *("workers", "devices_per_worker", "chief", "log_dir", "show", "grace_s", "log_level"),
    *("nnodes", "coordinator"),
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith("STRATAGEM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def launched(monkeypatch):
    """Runs the command with a launcher that only notes what it is asked for."""
    calls = []

    def note(script, args, *, module, **options) -> Outcome:
        LaunchOptions(**options)
        calls.append((script, list(args), module, options))
        return Outcome(statuses=(), signum=None)

    monkeypatch.setattr(scripts, "run_script", note)

    def launch(*arguments: str, **variables: str):
        result = CliRunner().invoke(main, ["launch", *arguments], env=variables)
        assert result.exit_code == 0, result.output
        return calls.pop()

    return launch


def error_of(*arguments: str, code: int = 1, **variables: str) -> str:
    result = CliRunner().invoke(main, ["launch", *arguments], env=variables)
    assert result.exit_code == code, result.stderr
    return result.stderr


def test_every_option_of_the_launcher_is_one_of_the_command() -> None:
    fields = [field.name for field in dataclasses.fields(LaunchOptions)]
    assert fields == list(OPTIONS)
    assert list(VALUES) == fields


@pytest.mark.parametrize("name", [None, *VALUES])
def test_option_is_taken_in_both_spellings(launched, name) -> None:
    """And nothing else is told to the launcher, which has its own defaults."""
    for flag in [] if name is None else (name, name.replace("_", "-")):
        text, value = VALUES[name]
        words = [f"--{flag}", *([] if text is None else [text])]
        assert launched(*words, "train.py") == ("train.py", [], False, {name: value})
    assert launched("train.py") == ("train.py", [], False, {})


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_option_is_taken_from_its_variable(launched, name) -> None:
    variable = f"STRATAGEM_{name.upper()}"
    given = {variable: VALUES[name][0] or "1"}
    assert launched("train.py", **given)[3] == {name: VALUES[name][1]}


def test_command_line_wins_over_the_environment(launched) -> None:
    variables = {"STRATAGEM_WORKERS": "3", "STRATAGEM_PS": "3", "STRATAGEM_CHIEF": "0"}
    options = launched("--workers", "4", "train.py", **variables)[3]
    assert options == {"workers": 4, "ps": 3, "chief": False}


@pytest.mark.parametrize(
    ("arguments", "variables", "level"),
    [
        (["-v"], {}, "info"),
        (["-vv"], {"STRATAGEM_LOG_LEVEL": "error"}, "debug"),
        (["-q"], {}, "error"),
        (["-v", "--log-level", "WARNING"], {}, "warning"),
    ],
)
def test_verbosity_is_the_level_of_the_tasks(launched, arguments, variables, level) -> None:
    assert launched(*arguments, "train.py", "-v", **variables) == (
        "train.py",
        ["-v"],
        False,
        {"log_level": level},
    )


def test_options_of_torchrun_are_taken_in_its_spelling(launched) -> None:
    arguments = ["--nnodes", "2", "--nproc_per_node", "4", "--node_rank", "1", "train.py"]
    assert launched(*arguments)[3] == {"nnodes": 2, "workers": 4, "node_rank": 1}
    assert launched("--nproc-per-node=4", "train.py")[3] == {"workers": 4}


@pytest.mark.parametrize(
    "args", [["--workers", "9", "-m", "--help"], ["a b", "--log_dir", "x"], ["-x", "--", "y"]]
)
def test_what_follows_the_script_is_the_script_s(launched, args) -> None:
    assert launched("--workers=2", "train.py", *args) == ("train.py", args, False, {"workers": 2})
    assert launched("-m", "my_package.my_module", *args)[:3] == ("my_package.my_module", args, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--devices-per-worker", "0", "x.py"], 2, "0 is not in the range x>=1"),
        (["--show", "some", "x.py"], 2, "'some' is not one of 'all', 'leader'"),
        (["--nnodes", "4:2", "x.py"], 2, "'4:2' is not a valid integer range"),
        ([], 2, "Missing argument 'SCRIPT'"),
        # The launcher's own errors, without a traceback.
        (["no-such-script.py"], 1, "Error: There is no file 'no-such-script.py'"),
        (["--workers", "0", "x"], 1, "Error: There is no program 'x'"),
        (["--workers", "0", "true"], 1, "Error: workers=0 without a chief"),
    ],
)
def test_mistakes_are_named(arguments, code, words) -> None:
    text = error_of(*arguments, code=code)
    assert text.startswith(words) if code == 1 else words in text


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-9, 137)])
def test_exit_code_is_that_of_the_cause(monkeypatch, returncode, code) -> None:
    statuses = (ExitStatus(name="worker 0", returncode=returncode, at_s=0.0),)
    outcome = Outcome(statuses=statuses, signum=None)
    monkeypatch.setattr(scripts, "run_script", lambda *_, **__: outcome)
    assert error_of("true", code=code) == ""


def test_real_tasks_run_and_their_failure_is_reported(tmp_path, capfd) -> None:
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "assert json.loads(os.environ['TF_CONFIG'])['task']['index'] == 0, sys.argv[1]\n"
    )
    options = ["--workers=2", "--ps=1", "--log_dir", str(tmp_path / "logs")]
    with pytest.raises(SystemExit) as caught:
        main(["launch", *options, str(tmp_path / "train.py"), "not here"])
    assert caught.value.code == 1
    err = capfd.readouterr().err
    assert "[launch] worker 1 failed first: exit code 1.\n" in err
    assert "[launch]     AssertionError: not here\n" in err
    assert "AssertionError: not here" in (tmp_path / "logs" / "worker-1.log").read_text()


def default_in_help(name: str) -> str | None:
    named = re.search(r"\[default: (.*)\]", OPTIONS[name].help or "")
    return named and named[1]


@pytest.mark.parametrize("field", dataclasses.fields(LaunchOptions), ids=lambda field: field.name)
def test_default_that_the_help_names_is_the_launcher_s(field) -> None:
    named = default_in_help(field.name)
    unset = {"devices_per_worker": "the GPUs shared evenly", "max_preemptions": "no limit"}
    if field.name in unset:
        assert (field.default, named) == (None, unset[field.name])
    elif field.default is None or field.default is False:
        assert named is None
    else:
        assert named is not None
        assert type(field.default)(named) == field.default


def test_page_lists_every_option_with_its_variable_and_default() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, option in OPTIONS.items():
        row = re.search(
            rf"^\| `--{name.replace('_', '-')}[^`]*` \| `{option.envvar}` \| (.*?) \|", page, re.M
        )
        assert row is not None, name
        assert row[1] == (default_in_help(name) or "-"), name


@pytest.mark.slow
def test_example_of_the_page_prints_the_output_shown(tmp_path, monkeypatch, capfd) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page.split("## An example\n")[1], re.M | re.S)
    program, command, text = blocks[:3]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(program)
    shown = text.replace('"train.py"', f'"{tmp_path}/train.py"').splitlines()
    with pytest.raises(SystemExit) as caught:
        main(command.split()[1:])
    assert caught.value.code == 0
    printed = "".join(capfd.readouterr()).splitlines()
    for name in ("launch", "worker 1"):
        # stdout and stderr are caught apart, so that a task's lines can be in another order.
        own = [
            [line for line in lines if line.startswith(f"[{name}]")] for lines in (printed, shown)
        ]
        assert own[0] == own[1] if name == "launch" else sorted(own[0]) == sorted(own[1])
    # Worker 0 may be stopped before it has printed a thing.
    assert 1 <= printed.count("[worker 0] one of 2") <= 2

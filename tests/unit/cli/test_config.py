"""`stratagem config`: files that it writes, and effective values with their sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest
from click.testing import Result

from stratagem import settings
from stratagem.cli import main
from stratagem.cli.config import default_text, effective_values
from stratagem.cli.launch import read_file
from stratagem.launch.options import LaunchOptions
from stratagem.settings import SETTINGS
from tests.command_runner import CliRunner


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path) -> None:
    for name in list(os.environ):
        if name.startswith("STRATAGEM_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def _call(*arguments: str, text: str | None = None, **variables: str) -> Result:
    return CliRunner().invoke(main, ["config", *arguments], input=text, env=variables)


def shown(*arguments: str, **variables: str) -> dict[str, tuple[object, str]]:
    result = _call("--show", "--json", *arguments, **variables)
    assert result.exit_code == 0, result.output
    return {one["name"]: (one["value"], one["source"]) for one in json.loads(result.stdout)}


def test_default_file_has_every_key_and_changes_nothing(tmp_path) -> None:
    result = _call("--default")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("Wrote stratagem.toml. Use it: stratagem launch --config")
    path = tmp_path / "stratagem.toml"
    assert path.read_text() == default_text()
    assert LaunchOptions(**read_file(path).options) == LaunchOptions(log_level="auto")
    assert read_file(path).variables == {}
    # Without the marks of comments, the settings are their defaults.
    lines = [line.removeprefix("# ") for line in default_text().splitlines() if " = " in line]
    for setting in SETTINGS.values():
        if not setting.is_option:
            assert tomllib.loads("\n".join(lines))[setting.key] == setting.default
        assert f"\n{setting.key} =" in default_text().replace("\n# ", "\n")


def test_answers_are_written(tmp_path) -> None:
    answers = ["4", "y", "many", "2", "", "0", "2", "3", 'logs "of" a run', ""]
    result = _call("run.toml", text="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert "'many' is not a valid integer" in result.stderr
    assert "0 is not in the range x>=1" in result.stderr
    assert tomllib.loads((tmp_path / "run.toml").read_text()) == {
        "workers": 4,
        "chief": True,
        "ps": 2,
        "evaluator": False,
        "devices-per-worker": 2,
        "max-restarts": 3,
        "log-dir": 'logs "of" a run',
    }


def test_dialogue_that_ends_early_writes_nothing(tmp_path) -> None:
    command = [sys.executable, "-m", "stratagem", "config"]
    assert subprocess.run(command, input=b"4\n", capture_output=True).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_replaced_only_by_force(tmp_path) -> None:
    path = tmp_path / "stratagem.toml"
    path.write_text("mine")
    result = _call("--default")
    assert (result.exit_code, path.read_text()) == (1, "mine")
    assert "stratagem.toml exists: give another file, or --force" in result.stderr
    assert _call("--default", "--force", "-q").stderr == ""
    assert path.read_text() == default_text()


def test_file_that_cannot_be_written_is_named() -> None:
    result = _call("--default", "no/such/folder.toml")
    assert result.exit_code == 1
    assert "no/such/folder.toml cannot be written: No such file" in result.stderr


def test_sources_are_file_environment_and_default(tmp_path) -> None:
    (tmp_path / "a.toml").write_text(
        "workers = 2\nps = 2\npeer-timeout-s = 5\nlog_format = 'json'\n"
    )
    values = shown("a.toml", STRATAGEM_PS="3", STRATAGEM_LOG_FORMAT="text")
    assert values["workers"] == (2, "file a.toml")
    assert values["ps"] == (3, "environment STRATAGEM_PS")
    assert values["peer-timeout-s"] == (5.0, "file a.toml")
    assert values["log-format"] == ("text", "environment STRATAGEM_LOG_FORMAT")
    assert values["max-restarts"] == (0, "default")
    assert values["log-level"] == ("auto", "default")
    assert shown(STRATAGEM_CONFIG="a.toml")["workers"] == (2, "file a.toml")


def test_every_option_and_setting_is_shown_with_its_default() -> None:
    values = shown()
    assert {source for _, source in values.values()} == {"default"}
    defaults = {setting.key: setting.default for setting in SETTINGS.values()}
    assert {key: value for key, (value, _) in values.items()} == defaults
    assert [one.variable for one in effective_values(None)] == [
        setting.variable for setting in SETTINGS.values()
    ]


def test_table_has_the_same_rows() -> None:
    result = _call("--show", COLUMNS="200", STRATAGEM_WORKERS="3")
    rows = [line.strip("│").split("│") for line in result.stdout.splitlines() if line[0] == "│"]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert ["workers", "3", "environment STRATAGEM_WORKERS"] in cells
    assert ["log-dir", "-", "default"] in cells
    assert ["grace-s", "10", "default"] in cells
    assert len(cells) == len(shown())


def test_settings_of_a_file_reach_the_tasks(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.toml").write_text("peer-timeout-s = 5\nstuck-timeout-s = 6\nlog-level = 'info'")
    monkeypatch.setenv("STRATAGEM_STUCK_TIMEOUT_S", "7")
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "")
    monkeypatch.delenv("STRATAGEM_PEER_TIMEOUT_S")
    names = ("PEER_TIMEOUT_S", "STUCK_TIMEOUT_S", "LOG_LEVEL")
    printed = " ".join(f"$STRATAGEM_{name}" for name in names)
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--config", "a.toml", "--log-dir", ".", "sh", "-c", f"echo {printed}"])
    assert caught.value.code == 0
    assert (tmp_path / "worker-0.log").read_text() == "5 7 info\n"
    assert settings.read("peer_timeout_s") == 5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--show", "--default"], 2, "--default, --show and --schema exclude each other"),
        (["--json"], 2, "--json needs --show: what is written is TOML"),
        (["--show", "none.toml"], 1, "none.toml cannot be read"),
    ],
)
def test_wrong_use_is_explained(arguments, code, words) -> None:
    result = _call(*arguments)
    assert result.exit_code == code
    assert words in result.stderr


def test_wrong_variable_is_explained() -> None:
    result = _call("--show", STRATAGEM_PEER_TIMEOUT_S="soon")
    assert result.exit_code == 1
    assert "STRATAGEM_PEER_TIMEOUT_S: 'soon' is not a time limit" in result.stderr
    result = _call("--show", STRATAGEM_WORKERS="many")
    assert result.exit_code == 2
    assert "'many' is not a valid integer" in result.stderr

"""The TOML file of `stratagem launch --config`: keys, values, and the JSON Schema for editors."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import click
import jsonschema
import pytest

from stratagem.cli.config import file_schema
from stratagem.cli.launch import command, read_file
from stratagem.settings import SETTINGS

STORED = Path(__file__).parents[3] / "docs" / "reference" / "stratagem.schema.json"
VALID = [
    "",
    "workers = 4\nmax-restarts = 3\n",
    "max_restarts = 3\npeer_timeout_s = 5",
    "show = 'leader'\nchief = true\ngrace-s = 2\nlog-dir = 'logs'",
    "peer-timeout-s = 0.5\nrun-eagerly = true\njobs-port = 9000\nlog-format = 'json'",
    "log-level = 'DEBUG'\ntpu-platform = 'cpu'\ncache-dir = ''",
]
INVALID = [
    "worker = 4",
    "[launch]\nworkers = 4",
    "workers = '4'",
    "workers = true",
    "workers = 2.5",
    "chief = 1",
    "log-dir = 3",
    "peer-timeout-s = 0",
    "peer-timeout-s = '5'",
    "peer-timeout-s = true",
    "run-eagerly = 1",
    "jobs-port = 0",
    "jobs-port = 1.5",
    "log-format = 'xml'",
    "log-format = 1",
    "config = 'other.toml'",
    "verbose = 1",
    "help = true",
]
# Click checks these after the file is read, and the schema before.
INVALID_FOR_CLICK = [
    "workers = -1",
    "show = 'some'",
    "log-level = 'loud'",
    "grace-s = -0.5",
    "evict-slow = 1",
    "node-timeout-s = 0",
]


def written(tmp_path, text: str) -> Path:
    path = tmp_path / "launch.toml"
    path.write_text(text)
    return path


def accepts(path: Path) -> bool:
    try:
        command.make_context("launch", ["--config", str(path), "train.py"])
    except click.ClickException:
        return False
    return True


@pytest.mark.parametrize("text", [*VALID, *INVALID, *INVALID_FOR_CLICK])
def test_schema_and_launcher_accept_the_same_files(tmp_path, text) -> None:
    is_valid = text in VALID
    schema = jsonschema.Draft202012Validator(file_schema())
    assert schema.is_valid(tomllib.loads(text)) is is_valid
    assert accepts(written(tmp_path, text)) is is_valid


def test_schema_is_a_schema_and_the_stored_one() -> None:
    schema = file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    # Otherwise: stratagem config --schema > docs/reference/stratagem.schema.json
    assert json.loads(STORED.read_text(encoding="utf-8")) == schema


def test_schema_explains_every_key_in_both_spellings() -> None:
    properties = file_schema()["properties"]
    keys = [(setting.name, setting.key) for setting in SETTINGS.values()]
    assert set(properties) == {key for both in keys for key in both}
    assert all(one["description"].endswith(".") for one in properties.values())
    assert properties["workers"] == {
        "type": "integer",
        "minimum": 0,
        "description": "Number of workers, of each node if there are several.",
        "default": 1,
    }
    # What a launch shows, not what a process shows by itself.
    assert properties["log-level"]["description"].startswith("Lowest level of log records that tas")


def test_options_and_settings_are_apart(tmp_path) -> None:
    text = "workers = 2\npeer-timeout-s = 5\nrun-eagerly = true\nlog-level = 'info'"
    values = read_file(written(tmp_path, text))
    assert values.options == {"workers": 2, "log_level": "info"}
    assert values.variables == {"STRATAGEM_PEER_TIMEOUT_S": "5", "STRATAGEM_RUN_EAGERLY": "1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-restart = 1", "has the unknown key 'max-restart'. Did you mean 'max-restarts'?"),
        ("peer_timeout = 1", "has the unknown key 'peer_timeout'. Did you mean 'peer-timeout-s'?"),
        ("xyzzy = 1", "has the unknown key 'xyzzy'.\nExpected keys among workers,"),
        ("log-dir = 'a'\nlog_dir = 'b'", "has log-dir and log_dir, which are the same option"),
        ("log-format = 'xml'", "has log-format = 'xml', which is not one of text, json"),
        ("jobs-port = 0", "has jobs-port = 0, which is not an integer of at least 1"),
    ],
)
def test_invalid_file_is_explained(tmp_path, text, words) -> None:
    path = written(tmp_path, text)
    with pytest.raises(click.ClickException) as caught:
        read_file(path)
    assert caught.value.message.startswith(f"{path} {words}")

"""The TOML file of `stratagem launch --config`: keys, values, and the JSON Schema for editors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import jax
import jsonschema
import pytest

import stratagem as sg
from stratagem.cli import main
from stratagem.cli.config import EffectiveValue, file_schema, show_values
from stratagem.cli.devices import device_names, memory_text
from stratagem.cli.launch import command, read_file
from stratagem.settings import SETTINGS
from tests.command_runner import CliRunner
from tests.fresh_process import run_fresh

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
    result = CliRunner().invoke(main, ["config", "--schema"])
    assert (result.exit_code, result.stderr, json.loads(result.stdout)) == (0, "", schema)


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


# `stratagem devices`: every local device, and the replicas of each strategy.


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str = "gpu"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


@pytest.fixture
def lines() -> list[list[str]]:
    """The cells of each line that is a row of a table."""
    result = CliRunner().invoke(main, ["devices"], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_every_local_device_has_a_row(lines) -> None:
    rows = {cells[0]: cells[1] for cells in lines}
    for index, device in enumerate(jax.local_devices()):
        assert rows[f"{device.platform}:{index}"] == device.device_kind


def test_strategies_show_their_replicas_and_devices(lines) -> None:
    rows = {cells[0]: cells[1:] for cells in lines}
    names = [f"{device.platform}:{index}" for index, device in enumerate(jax.local_devices())]
    assert rows["MirroredStrategy()"] == [str(jax.local_device_count()), ", ".join(names)]
    assert rows[f'OneDeviceStrategy("{names[0]}")'] == ["1", names[0]]
    assert rows["none (default)"][0] == "1"


def test_json_has_the_strategies_as_they_are() -> None:
    result = CliRunner().invoke(main, ["devices", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    values = json.loads(result.stdout)
    assert (values["jax"], values["backend"]) == (jax.__version__, jax.default_backend())
    names = device_names(jax.local_devices())
    assert [one["name"] for one in values["devices"]] == names
    made = {
        f'OneDeviceStrategy("{names[0]}")': sg.OneDeviceStrategy(names[0]),
        "MirroredStrategy()": sg.MirroredStrategy(),
    }
    named = dict(zip(jax.local_devices(), names, strict=True))
    assert {
        one["strategy"]: (one["num_replicas"], one["devices"]) for one in values["strategies"]
    } == {
        call: (
            strategy.num_replicas_in_sync,
            [named[device] for device in strategy.extended.worker_devices],
        )
        for call, strategy in made.items()
    }


@pytest.mark.slow  # starts JAX in a process of its own
def test_keras_is_not_loaded() -> None:
    program = "import sys; from stratagem.cli import main\ntry: main(['devices'])\n"
    program += "except SystemExit: print('keras' in sys.modules)"
    assert run_fresh(program)[-1] == "False"


def test_memory_is_shown_where_the_platform_counts_it() -> None:
    assert memory_text(FakeDevice(stats={"bytes_limit": 3 * 2**29})) == "1.5 GiB"
    assert memory_text(FakeDevice(stats=None)) == "-"


def test_another_backend_is_reported_in_one_message(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "keras")
    result = CliRunner().invoke(main, ["devices"], env={"KERAS_BACKEND": "torch"})
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: KERAS_BACKEND is 'torch'.")


# Markdown in a terminal with and without colors.

pty = pytest.importorskip("pty", reason="pseudo-terminals are of POSIX")

TEXT = "# Title\n\nSome `code`.\n\n"


def _in_terminal(**variables: str) -> str:
    """Returns what is printed into a terminal."""
    reader, writer = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"} | variables
    program = f"from stratagem.cli.explain import show; show({TEXT!r})"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=writer, env=environment) as process:
        os.close(writer)
        printed = b""
        try:
            while part := os.read(reader, 4096):
                printed += part
        except OSError:  # Linux: the other end is closed
            pass
        os.close(reader)
        assert process.wait(60) == 0
    return printed.decode().replace("\r\n", "\n")


def test_terminal_shows_rendered_markdown() -> None:
    rendered = _in_terminal()
    assert "\x1b[" in rendered
    assert "Title" in rendered
    assert "# Title" not in rendered
    assert "`code`" not in rendered


def test_terminal_without_colors_shows_the_text_itself() -> None:
    assert _in_terminal(NO_COLOR="1") == "# Title\n\nSome `code`.\n"


# `stratagem test`, as an administrator runs it.


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stratagem", "test", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_chosen_case_is_run() -> None:
    finished = _run("--only", "default", "--json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (row,) = json.loads(finished.stdout)
    assert row["passed"]
    assert row["case"]["name"] == "default"


@pytest.mark.slow
def test_case_that_fails_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    finished = _run("--only", "default")
    assert finished.returncode == 1
    assert "failed" in finished.stdout


def test_unknown_case_is_a_usage_error() -> None:
    finished = _run("--only", "abacus")
    assert finished.returncode == 2
    assert "No such case: abacus. There are default, one_device, mirrored" in finished.stderr


# Plain tables.


def test_cells_are_shown_as_they_are(capsys) -> None:
    values = [
        EffectiveValue(name="a", value="[bold]1[/bold]", source="file", variable="A"),
        EffectiveValue(name="b", value=None, source="default", variable="B"),
    ]
    show_values(values, as_json=False)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row.strip("│").split("│")] for row in rows] == [
        ["a", '"[bold]1[/bold]"', "file"],
        ["b", "-", "default"],
    ]

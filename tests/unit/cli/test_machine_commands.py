"""`stratagem devices`, `stratagem config`, and Markdown in a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

import stratagem as sg
from stratagem.cli import main
from stratagem.cli.doctor.command import local_devices_and_strategies
from stratagem.devices import finding
from stratagem.settings import SETTINGS
from tests.command_runner import CliRunner
from tests.fresh_process import run_fresh

# `stratagem devices`: every local device, and the replicas of each strategy.


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str = "gpu"
    device_kind: str = "H100"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def _cells() -> list[list[str]]:
    """The cells of each line that is a row of a table."""
    result = CliRunner().invoke(main, ["devices"], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


_NAMES = [f"{device.platform}:{index}" for index, device in enumerate(jax.local_devices())]


def test_every_local_device_has_a_row() -> None:
    rows = {cells[0]: cells[1] for cells in _cells()}
    assert [rows[name] for name in _NAMES] == [one.device_kind for one in jax.local_devices()]


def test_strategies_show_their_replicas_and_devices() -> None:
    rows = {cells[0]: cells[1:] for cells in _cells()}
    assert rows["MirroredStrategy()"] == [str(jax.local_device_count()), ", ".join(_NAMES)]
    assert rows[f'OneDeviceStrategy("{_NAMES[0]}")'] == ["1", _NAMES[0]]
    assert rows["none (default)"][0] == "1"


def test_json_has_the_strategies_as_they_are() -> None:
    result = CliRunner().invoke(main, ["devices", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    values = json.loads(result.stdout)
    assert (values["jax"], values["backend"]) == (jax.__version__, jax.default_backend())
    assert [one["name"] for one in values["devices"]] == _NAMES
    found = {one["strategy"]: (one["num_replicas"], one["devices"]) for one in values["strategies"]}
    named = dict(zip(jax.local_devices(), _NAMES, strict=True))
    made = {
        f'OneDeviceStrategy("{_NAMES[0]}")': sg.OneDeviceStrategy(_NAMES[0]),
        "MirroredStrategy()": sg.MirroredStrategy(),
    }
    assert found == {
        call: (one.num_replicas_in_sync, [named[each] for each in one.extended.worker_devices])
        for call, one in made.items()
    }


@pytest.mark.slow  # starts JAX in a process of its own
def test_keras_is_not_loaded() -> None:
    program = "import sys; from stratagem.cli import main\ntry: main(['devices'])\n"
    program += "except SystemExit: print('keras' in sys.modules)"
    assert run_fresh(program)[-1] == "False"


def test_memory_is_shown_where_the_platform_counts_it(monkeypatch) -> None:
    made = [FakeDevice(stats={"bytes_limit": 3 * 2**29}), FakeDevice(), FakeDevice("cpu")]
    monkeypatch.setattr(finding, "local_devices", lambda: made)
    found = [
        (one["name"], one["memory_bytes"]) for one in local_devices_and_strategies()["devices"]
    ]
    assert found == [("gpu:0", 3 * 2**29), ("gpu:1", None), ("cpu:0", None)]
    rows = CliRunner().invoke(main, ["devices"], env={"COLUMNS": "200"}).output
    assert "│ gpu:0  │ H100 │ 1.5 GiB │" in rows
    assert "│ gpu:1  │ H100 │ -       │" in rows


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


# `stratagem config`: the settings in force.


def test_settings_are_shown_with_their_source(monkeypatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("STRATAGEM_PS", "3")
    result = CliRunner().invoke(main, ["config", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    values = {one.pop("variable"): one for one in json.loads(result.stdout)}
    assert list(values) == [setting.variable for setting in SETTINGS.values()]
    assert values["STRATAGEM_PS"] == {"value": 3, "is_set": True}
    assert values["STRATAGEM_PEER_TIMEOUT_S"] == {"value": 30.0, "is_set": False}
    lines = CliRunner().invoke(main, ["config"]).stdout.splitlines()
    assert len(lines) == len(values)
    assert {"STRATAGEM_PS=3", "STRATAGEM_LOG_DIR=  (default)"} <= set(lines)


def test_setting_that_is_wrong_is_explained() -> None:
    result = CliRunner().invoke(main, ["config"], env={"STRATAGEM_PEER_TIMEOUT_S": "soon"})
    assert result.exit_code == 1
    assert "STRATAGEM_PEER_TIMEOUT_S: 'soon' is not a time limit" in result.stderr

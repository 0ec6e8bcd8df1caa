"""`stratagem devices`: every local device, and the replicas of each strategy."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import pytest

import stratagem as sg
from stratagem.cli import main
from stratagem.cli.devices import device_names, memory_text
from tests.command_runner import CliRunner
from tests.fresh_process import run_fresh


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


def test_names_count_within_a_platform() -> None:
    devices = [FakeDevice("gpu"), FakeDevice("gpu"), FakeDevice("cpu")]
    assert device_names(devices) == ["gpu:0", "gpu:1", "cpu:0"]


def test_memory_is_shown_where_the_platform_counts_it() -> None:
    assert memory_text(FakeDevice(stats={"bytes_limit": 3 * 2**29})) == "1.5 GiB"
    assert memory_text(FakeDevice(stats=None)) == "-"


def test_another_backend_is_reported_in_one_message(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "keras")
    result = CliRunner().invoke(main, ["devices"], env={"KERAS_BACKEND": "torch"})
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: KERAS_BACKEND is 'torch'.")

"""`stratagem profile`: output and exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import Result

from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.observe.profiling.fabricated import OPERATIONS, two_steps, write


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    for worker in (0, 1):
        path = tmp_path / f"worker-{worker}" / "plugins" / "profile" / "a" / "vm.xplane.pb"
        write(path, two_steps(), OPERATIONS)
    return tmp_path


def test_tables_of_each_worker(folder) -> None:
    result = _call(folder, "--top", 1)
    assert (result.exit_code, result.stderr) == (0, "")
    titles = [line for line in result.stdout.splitlines() if line.startswith("worker-")]
    assert titles == [
        f"worker-{worker}: 2 steps of 0.00 ms, 2 CPU devices, busy 70%" for worker in (0, 1)
    ]
    assert "model/dense" in result.stdout
    assert "all-reduce" not in result.stdout


def test_json_has_the_same(folder) -> None:
    result = _call(folder, "--json", "--top", 1)
    first, second = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert first["trace"].endswith("worker-0/plugins/profile/a/vm.xplane.pb")
    assert first["parts_s"] == second["parts_s"]
    assert sum(first["parts_s"].values()) == pytest.approx(2e-6)
    assert [one["layer"] for one in first["operations"]] == ["model/dense"]


def test_file_is_named_in_its_title(folder) -> None:
    result = _call(folder / "worker-0" / "plugins" / "profile" / "a" / "vm.xplane.pb")
    assert result.stdout.startswith("vm.xplane.pb: 2 steps of")


@pytest.mark.parametrize("name", ["", "missing"])
def test_folder_without_a_trace_ends_with_exit_code_1(name, tmp_path) -> None:
    result = _call(tmp_path / name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Expected a .xplane.pb file" in result.stderr


def test_number_of_operations_below_zero_ends_with_exit_code_2(folder) -> None:
    assert _call(folder, "--top", -1).exit_code == 2

"""`stratagem goodput`: output, plots and exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import Result

from stratagem import environment as optional_libraries
from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.observe.goodput.runs import gang_restart, write


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["goodput", *map(str, arguments)])


def test_tables_of_a_run(tmp_path) -> None:
    write(tmp_path, gang_restart())
    result = _call(tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Goodput after start-up: 0.588 (40.0 s useful of 1 min 08 s)")
    assert "worker 1 lost" in result.stdout


def test_json_is_the_account(tmp_path) -> None:
    write(tmp_path, gang_restart())
    result = _call(tmp_path, "--json")
    values = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert values["goodput"] == pytest.approx(40 / 78)
    assert values["goodput_after_startup"] == pytest.approx(40 / 68)
    assert values["startup_s"] == pytest.approx(10)
    assert values["time_s"]["repeated"] == pytest.approx(10)
    assert sum(values["time_s"].values()) == pytest.approx(values["whole_s"])


def test_plot_is_written_along_with_the_tables(tmp_path) -> None:
    write(tmp_path, gang_restart())
    result = _call(tmp_path, "--plot", tmp_path / "run.png")
    assert result.exit_code == 0
    assert "Goodput with start-up:  0.513" in result.stdout
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_torn_line_is_reported_and_no_error(tmp_path) -> None:
    write(tmp_path, gang_restart())
    with (tmp_path / "events" / "worker-0.1.jsonl").open("a") as file:
        file.write('{"version": 1, "ki')
    result = _call(tmp_path)
    assert result.exit_code == 0
    assert "Unreadable: worker-0.1.jsonl, line" in result.stdout


@pytest.mark.parametrize("name", ["", "missing"])
def test_folder_without_events_ends_with_exit_code_1(tmp_path, name) -> None:
    result = _call(tmp_path / name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no events." in result.stderr
    assert "Fix: pass the value of STRATAGEM_RUN_DIR during the run." in result.stderr


@pytest.mark.parametrize("ending", ["coffee", ""])
def test_picture_of_no_known_format_ends_with_exit_code_1(tmp_path, ending) -> None:
    write(tmp_path, gang_restart())
    result = _call(tmp_path, "--plot", f"{tmp_path}/new/run.{ending}" if ending else tmp_path)
    assert (result.exit_code, result.stdout) == (1 if ending else 2, "")
    assert ("coffee" if ending else "is a directory") in result.stderr


def test_plot_without_matplotlib_names_the_package(tmp_path, monkeypatch) -> None:
    def without(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    write(tmp_path, gang_restart())
    monkeypatch.setattr(optional_libraries, "importlib", type("", (), {"import_module": without}))
    result = _call(tmp_path, "--plot", tmp_path / "run.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "The plot of a run needs matplotlib.figure" in result.stderr
    assert "pip install 'stratagem[observe]'" in result.stderr

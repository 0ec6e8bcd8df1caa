"""`stratagem report`: the file, and exit codes."""

from __future__ import annotations

import pytest
from click.testing import Result

from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.observe.goodput.runs import gang_restart, straggling, write


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


@pytest.mark.slow
def test_report_is_in_the_folder_of_the_run_by_default(tmp_path) -> None:
    write(tmp_path, straggling())
    result = _call(tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"Wrote {tmp_path}/report.html.\n")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_two_runs_in_a_file(tmp_path) -> None:
    write(tmp_path / "a", straggling())
    write(tmp_path / "b", gang_restart())
    result = _call(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "both.html")
    assert result.exit_code == 0
    assert (tmp_path / "both.html").read_text().count("<h1>") == 2


@pytest.mark.parametrize("which", [0, 1])
def test_folder_without_events_ends_with_exit_code_1(tmp_path, which) -> None:
    write(tmp_path / "a", straggling())
    folders = [tmp_path / "a", tmp_path / "none"]
    result = _call(*(folders if which else reversed(folders)))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{tmp_path}/none has no events." in result.stderr
    assert not list(tmp_path.rglob("*.html"))

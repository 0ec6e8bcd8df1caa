"""The picture of all ratios, from files of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overview import main, read_ratios
from benchmarks.report import make_row, make_row_of_times
from tests.command_runner import CliRunner


def write(folder: Path, benchmark: str, **rounds: list[float]) -> None:
    """Writes results with a row for each case, whose reference takes a second."""
    rows = [make_row(case, ours, [1.0] * len(ours), "reference") for case, ours in rounds.items()]
    (folder / f"{benchmark}.json").write_text(json.dumps({"rows": rows}))


def test_ratios_of_all_benchmarks_are_sorted(tmp_path) -> None:
    write(tmp_path, "one", fast=[2.0, 2.1, 2.2], slow=[0.5, 0.5, 0.6])
    write(tmp_path, "other", level=[0.9, 1.0, 1.2])
    (tmp_path / "growth.json").write_text(json.dumps({"rows": [{"axis": "replicas"}]}))
    (tmp_path / "plan.json").write_text(json.dumps({"plans": []}))
    apart = make_row("two workers", [9.0], [1.0], "one worker") | {"has_peer": False}
    sums = make_row_of_times("sums", [0.5, 0.5], [0.6], "reference")
    (tmp_path / "sums.json").write_text(json.dumps({"rows": [apart], "ratios": [sums]}))
    ratios = read_ratios(tmp_path)
    assert [(one.benchmark, one.case, one.reference) for one in ratios] == [
        ("one", "fast", "reference"),
        ("sums", "sums", "reference"),
        ("other", "level", "reference"),
        ("one", "slow", "reference"),
    ]
    assert [one.interval.ratio for one in ratios] == pytest.approx([2.1, 1.2, 1.0, 0.5])
    assert ratios[2].interval.low < 1 < ratios[2].interval.high
    assert len({one.color for one in ratios}) == 3


def test_picture_is_drawn(tmp_path) -> None:
    write(tmp_path, "one", fast=[2.0, 2.1, 2.2], slow=[0.05, 0.05, 0.06])
    result = CliRunner().invoke(main, ["--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output == f"2 ratios: {tmp_path / 'overview.png'}\n"
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("folder", ["", "absent"])
def test_folder_without_results_is_an_error(tmp_path, folder) -> None:
    result = CliRunner().invoke(main, ["--results", str(tmp_path / folder)])
    assert result.exit_code != 0
    assert "make bench" in result.output or "does not exist" in result.output

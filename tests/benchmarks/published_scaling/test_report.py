"""What the table, the summary and the picture say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.published_scaling.report import ScaledRow, draw_scaling, make_table, summary

_SMALLEST = ScaledRow(
    group="MLPerf",
    model="ResNet-50",
    hardware="DGX A100",
    unit="images/s",
    is_complete=True,
    devices=8,
    batch=408,
    passes=1,
    published=20_000,
    predicted=25_000,
    published_scaling=1,
    predicted_scaling=1,
    device_ratio=1,
)
_LARGE = dataclasses.replace(
    _SMALLEST,
    devices=4096,
    passes=2,
    published=8e6,
    predicted=11e6,
    published_scaling=400,
    predicted_scaling=440,
    device_ratio=512,
)
_FAR = dataclasses.replace(_LARGE, group="other", is_complete=False, predicted_scaling=480)


def test_errors_are_of_scaling_and_of_throughput() -> None:
    assert _LARGE.error == pytest.approx(0.1)
    assert _LARGE.throughput_error == pytest.approx(0.375)
    assert _LARGE.linear_error == pytest.approx(0.28)
    assert _SMALLEST.is_smallest
    assert not _LARGE.is_smallest


def test_smallest_rows_do_not_count() -> None:
    line = summary([_SMALLEST, _LARGE, _FAR])
    assert "1 of 1 rows whose configuration is complete (linear scaling: 0 of 1)" in line
    assert "0 of 1 rows whose configuration is incomplete (linear scaling: 0 of 1)" in line


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=140).print(make_table([_SMALLEST, _LARGE, _FAR], "gpu"))
    printed = capsys.readouterr().out
    assert "+10.0%" in printed
    assert "408 x 2" in printed
    assert printed.count("(incomplete)") == 1


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_scaling(tmp_path / "pictures" / "scaling.png", [_SMALLEST, _LARGE])
    assert (tmp_path / "pictures" / "scaling.png").stat().st_size > 10_000

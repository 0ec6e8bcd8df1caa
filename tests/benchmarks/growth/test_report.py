"""Growth as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.growth.report import Growth, draw_growth, make_table, time_text

SIZES = [10, 100, 1000]
LINEAR = Growth("variables", "call_s", SIZES, [size * 2e-6 for size in SIZES], [1e-5, 1e-4, 1e-3])
STEEP = Growth("replicas", "trace_s", SIZES, [1e-4 * size**2 for size in SIZES], [1e-3, 1e-2, 0.1])


def test_steep_growth_is_told_from_that_of_the_step_by_hand() -> None:
    assert LINEAR.exponents == (pytest.approx(1), pytest.approx(1))
    assert not LINEAR.is_steep
    assert STEEP.is_steep
    as_steep = [1e-5 * size**2 for size in SIZES]
    assert not Growth("replicas", "trace_s", SIZES, STEEP.ours_s, as_steep).is_steep


def test_table_has_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(make_table([LINEAR, STEEP]))
    printed = capsys.readouterr().out
    assert [line.count("us") for line in printed.splitlines() if "variables" in line] == [3]
    assert "2 ms" in printed
    assert "2.00, 1.00" in printed


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (-0.0123, "-12.3 ms"), (4e-8, "0.04 us"), (0.0, "0 us")]
)
def test_times_have_units(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_growth(tmp_path / "pictures" / "growth.png", [LINEAR, STEEP], "a machine")
    assert (tmp_path / "pictures" / "growth.png").stat().st_size > 10_000

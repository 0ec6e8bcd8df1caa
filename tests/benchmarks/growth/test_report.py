"""Growth as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.growth.report import Growth, draw_growth, make_table, time_text

SIZES = [10, 100, 1000]


def growth(axis: str, ours_s: list[float], by_hand_s: list[float] | None = None) -> Growth:
    return Growth(
        axis=axis,
        cost="call",
        clock="CPU",
        sizes=SIZES,
        ours_s=ours_s,
        by_hand_s=by_hand_s or [],
    )


LINEAR = growth("variables", [size * 2e-6 for size in SIZES], [1e-5, 1e-4, 1e-3])
STEEP = growth("replicas", [1e-4 * size**2 for size in SIZES], [1e-3, 1e-2, 0.1])
ALONE = growth("closures", [1e-6 * size for size in SIZES])


def test_steep_growth_is_told_from_that_of_the_work_by_hand() -> None:
    assert LINEAR.exponents == (pytest.approx(1), pytest.approx(1))
    assert not LINEAR.is_steep
    assert STEEP.is_steep
    assert not growth("replicas", STEEP.ours_s, [1e-5 * size**2 for size in SIZES]).is_steep


def test_work_that_nobody_does_by_hand_has_one_exponent() -> None:
    assert ALONE.exponents == (pytest.approx(1),)
    assert not ALONE.is_steep
    assert growth("closures", STEEP.ours_s).is_steep


def test_table_has_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=140).print(make_table([LINEAR, STEEP, ALONE]))
    printed = capsys.readouterr().out
    assert [line.count("us") for line in printed.splitlines() if "variables" in line] == [3]
    assert "call (CPU)" in printed
    assert "2 ms" in printed
    assert "2.00, 1.00" in printed


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (-0.0123, "-12.3 ms"), (4e-8, "0.04 us"), (0.0, "0 us")]
)
def test_times_have_units(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.slow
def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    four = [LINEAR, STEEP, ALONE, growth("rows", [1e-6] * 3)]
    draw_growth(tmp_path / "pictures" / "growth.png", four, "a machine")
    assert (tmp_path / "pictures" / "growth.png").stat().st_size > 10_000

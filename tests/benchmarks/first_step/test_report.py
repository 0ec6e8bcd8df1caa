"""Tables, rows of the file and plot, against values by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.first_step.report import (
    FirstStep,
    Start,
    describe,
    draw_first_steps,
    make_start_table,
    make_table,
    peer_ratios,
)

KERAS = FirstStep(
    workload="MLP",
    name="Keras on JAX",
    is_warm=False,
    wanted=None,
    first_step_s=[2.0, 4.0, 5.0],
    first_step_cpu_s=[1.0, 2.0, 3.0],
    from_start_s=[4.0, 8.0, 10.0],
    second_step_s=[0.1, 0.2, 0.3],
)
OURS = dataclasses.replace(
    KERAS,
    name="Stratagem, 1 device",
    wanted=1.15,
    first_step_s=[3.0, 4.4, 5.0],
    from_start_s=[2.0, 4.0, 20.0],
)
WARM = dataclasses.replace(
    OURS, name="Stratagem, 1 device, warm", is_warm=True, wanted=0.5, first_step_s=[1.2, 2.4, 3.0]
)
ONCE = dataclasses.replace(
    KERAS,
    name="torch.compile",
    first_step_s=[20.0],
    first_step_cpu_s=[2.0],
    from_start_s=[24.0],
    second_step_s=[0.1],
)
ROWS = [OURS, KERAS, ONCE, WARM]
WORKERS = Start(
    name="two", seconds=[2.8, 3.0], reference_name="one", reference_s=[2.0, 2.0], wanted=1.3
)
IMPORT = Start(name="import", seconds=[0.05, 0.09, 0.2], wanted_s=0.1)


def test_ratios_stand_beside_keras_on_as_many_devices_and_with_the_same_cache() -> None:
    warm_keras = dataclasses.replace(KERAS, name="Keras on JAX, warm", first_step_s=[2.4, 1.2, 3.0])
    cold, warm = peer_ratios([*ROWS, warm_keras])
    assert (cold["case"], cold["reference_name"]) == ("MLP, 1 device", "Keras on JAX")
    assert (cold["ratio_min"], cold["ratio_max"]) == pytest.approx((2 / 3, 1.0))
    assert (warm["case"], warm["reference_name"]) == ("MLP, 1 device, warm", "Keras on JAX, warm")
    assert (warm["ratio_min"], warm["ratio_max"]) == pytest.approx((0.5, 2.0))


def cells(table: Table) -> list[list[str]]:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table)
    lines = (line for line in capture.get().splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_ratio_is_the_median_of_the_rounds() -> None:
    ours, keras, once, warm = describe(ROWS)
    assert ours["ratios"]["first_step_s"] == pytest.approx([1.5, 1.1, 1.0])
    assert ours["ratios"]["from_start_s"] == pytest.approx([0.5, 0.5, 2.0])
    assert ours["medians"] == {
        "first_step_s": 4.4,
        "first_step_cpu_s": 2.0,
        "from_start_s": 4.0,
        "second_step_s": 0.2,
    }
    assert ours["first_step_s"] == [3.0, 4.4, 5.0]
    assert keras["ratios"]["first_step_s"] == [1.0] * 3
    assert once["ratios"] == {
        "first_step_s": [10.0],
        "first_step_cpu_s": [2.0],
        "from_start_s": [6.0],
    }
    assert warm["ratios"]["first_step_s"] == pytest.approx([0.6, 0.6, 0.6])


def test_table_shows_every_side_beside_its_bound() -> None:
    lines = cells(make_table(ROWS))
    assert [line[:5] for line in lines] == [
        ["MLP", "Stratagem, 1 device", "4.40", "1.10", "≤ 1.15"],
        ["", "Keras on JAX", "4.00", "1.00", ""],
        ["", "torch.compile", "20.00", "10.00", ""],
        ["", "Stratagem, 1 device, warm", "2.40", "0.60", "≤ 0.50"],
    ]
    assert [line[5:] for line in lines] == [
        ["2.00", "1.00", "4.00", "0.50", "0.200"],
        ["2.00", "1.00", "8.00", "1.00", "0.200"],
        ["2.00", "2.00", "24.00", "6.00", "0.100"],
        ["2.00", "1.00", "4.00", "0.50", "0.200"],
    ]


def test_no_ratio_without_plain_keras() -> None:
    assert [row["ratios"] for row in describe([OURS])] == [{}]
    assert cells(make_table([OURS]))[0][3:5] == ["", "≤ 1.15"]


def test_starts_are_held_against_ratios_or_seconds() -> None:
    assert cells(make_start_table([WORKERS, IMPORT])) == [
        ["two", "2.900", "one", "2.000", "1.45", "≤ 1.30"],
        ["import", "0.090", "", "", "", "≤ 0.1 s"],
    ]
    assert not WORKERS.is_as_wanted
    assert dataclasses.replace(WORKERS, wanted=1.45).is_as_wanted
    assert IMPORT.is_as_wanted
    assert not dataclasses.replace(IMPORT, wanted_s=0.08).is_as_wanted
    assert WORKERS.described()["ratio"] == pytest.approx(1.45)
    assert IMPORT.described()["median_s"] == 0.09


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = dataclasses.replace(OURS, workload="BERT")  # plain Keras failed there
    draw_first_steps(tmp_path / "made" / "plot.png", [*ROWS, other], "somewhere")
    assert (tmp_path / "made" / "plot.png").stat().st_size > 10_000

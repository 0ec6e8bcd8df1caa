"""Rows and table, against values by hand."""

from __future__ import annotations

from rich.console import Console

from benchmarks.recommenders.report import Figures, make_rows, make_table, median_of

_FIGURES = Figures(
    "1 M x 64 rows",
    "TorchRec",
    "step",
    1_000,
    per_s=([2e6, 4e6, 3e6], [1e6, 1e6, 2e6]),
    cpu_s=(0.002, 0.003),
    sent_bytes=(500_000.0, 250_000.0),
    row_bytes=(280.0, 270.0),
)


def test_rows_have_ratios_and_costs_of_an_id() -> None:
    (row,) = make_rows([_FIGURES])
    assert row["case"] == "1 M x 64 rows: pull and push, 1,000 ids"
    assert [row[name] for name in ("ratio", "ratio_min", "ratio_max")] == [2.0, 1.5, 4.0]
    assert (row["cpu_us_per_id"], row["reference_cpu_us_per_id"]) == (2.0, 3.0)
    assert (row["sent_bytes_per_id"], row["reference_sent_bytes_per_id"]) == (500, 250)
    assert (row["row_bytes"], row["reference_row_bytes"]) == (280, 270)


def test_table_shows_both_sides() -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(make_rows([_FIGURES])))
    text = capture.get()
    for cell in ("3,000, 1,000", "2.00, 3.00", "500, 250", "280, 270", "TorchRec"):
        assert cell in text


def test_median_is_of_a_call() -> None:
    assert median_of([{"cpu_s": 4.0}, {"cpu_s": 8.0}, {"cpu_s": 6.0}], "cpu_s", 2) == 3.0

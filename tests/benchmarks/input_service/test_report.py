"""Rows, table and picture, against values by hand."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.input_service.cases import SIDES, Starved, by_name, can_run
from benchmarks.input_service.pictures import draw_busy
from benchmarks.input_service.report import make_rows, make_table

_WORK = Starved("objects", "Objects", 0.02, (0, 2))


def _told(*shares: float) -> list[dict[str, float]]:
    return [{"busy": share, "cpu_s": share / 100} for share in shares]


_FIGURES = {
    (_WORK, 0, "Stratagem"): _told(0.125),
    (_WORK, 0, "tf.data service"): _told(0.125),
    (_WORK, 2, "Stratagem"): _told(0.5, 0.25, 0.75),
    (_WORK, 2, "tf.data service"): _told(0.25, 0.25, 0.25),
    (_WORK, 2, "Ray Data"): _told(0.5, 0.5),  # failed in a round
}


def test_rows_compare_the_rounds_that_both_have() -> None:
    none, two, of_ray = make_rows(_FIGURES)
    assert none["ratio"] == 1
    assert (two["ratio"], two["ratio_min"], two["ratio_max"]) == (2, 1, 3)
    assert (two["cpu_ms"], two["reference_cpu_ms"]) == (5, 2.5)
    assert (of_ray["ratio_min"], of_ray["ratio_max"]) == (0.5, 1)
    assert of_ray["case"] == "Objects, 2 workers"


def test_table_shows_both_sides() -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(make_rows(_FIGURES)))
    for cell in ("50%, 25%", "2.00", "5.0, 2.5", "Ray Data"):
        assert cell in capture.get()


def test_picture_has_a_panel_for_each_work(tmp_path: Path) -> None:
    path = tmp_path / "busy.png"
    draw_busy(path, make_rows(_FIGURES), "a machine")
    assert path.stat().st_size > 1000


def test_work_is_chosen_by_name() -> None:
    assert [one.work for one in by_name("", is_quick=False)] == ["jpeg", "tokens", "objects"]
    (objects,) = by_name("Objects", is_quick=True)
    assert objects.num_workers == (0, 1)
    assert [can_run(side, 0) for side in SIDES] == [True, True, False]

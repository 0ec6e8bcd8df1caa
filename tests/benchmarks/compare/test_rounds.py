"""Rounds of two trees: each runs its own files, and takes its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import Environments
from benchmarks.compare import rounds
from benchmarks.compare.rounds import Compared, Plan, compare_subject
from benchmarks.compare.subjects import TrainingSubject
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError
from tests.benchmarks.compare.trees import make_tree
from tests.benchmarks.sides import fake_case, fake_side
from tests.run_events.test_wait_clock import ticking

EFFORT = Effort(num_rounds=3, round_s=4.0, start_limit_s=120.0, answer_limit_s=120.0)
SUBJECT = TrainingSubject(fake_case(fake_side("ours")))


def _compare(folder: Path, ours_s: float, base_s: float) -> Compared:
    trees = make_tree(folder / "ours", ours_s), make_tree(folder / "base", base_s)
    plan = Plan(trees, Environments(), EFFORT, num_starts=2, idle_s=0.01)
    (found,) = compare_subject(SUBJECT, plan, lambda text: None)
    return found


def test_ratio_is_above_one_if_the_working_tree_is_faster(tmp_path: Path) -> None:
    found = _compare(tmp_path, 0.5, 1.0)
    assert found.case == "case: ours"
    assert found.times_s == (((0.5,) * 3,) * 2, ((1.0,) * 3,) * 2)
    assert (found.interval.ratio, found.interval.low, found.interval.high) == (2.0, 2.0, 2.0)
    assert found.noise == 0.0
    assert len(found.busy_cores) == 2


def test_each_start_is_reported_at_its_end(tmp_path: Path) -> None:
    trees = make_tree(tmp_path / "ours", 0.5), make_tree(tmp_path / "base", 1.0)
    plan = Plan(trees, Environments(), EFFORT, num_starts=2, idle_s=0.01)
    lines: list[str] = []
    compare_subject(SUBJECT, plan, lambda text: None, lines.append)
    assert lines == [f"start {number} of 2: case: ours: 2.000" for number in (1, 2)]


def test_work_around_the_measured_part_counts_for_the_length_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a sum by each algorithm, where only the chosen one is measured."""
    clock = ticking()
    monkeypatch.setattr(rounds, "time", clock)

    def measure() -> float:
        for _ in range(20):
            clock.perf_counter()
        return 0.001

    assert rounds._elapsed_s(measure) == pytest.approx(0.021)
    assert rounds._elapsed_s(lambda: 5.0) == 5.0


def test_failure_names_the_revision(tmp_path: Path) -> None:
    trees = make_tree(tmp_path / "ours", 1.0), make_tree(tmp_path / "base", 1.0, dies=True)
    plan = Plan(trees, Environments(), EFFORT, num_starts=1, idle_s=0.01)
    with pytest.raises(WorkerError, match=r"ours at base(.|\n)*out of memory"):
        compare_subject(SUBJECT, plan, lambda text: None)

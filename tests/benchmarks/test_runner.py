"""Rounds in turns, ratios in our favour, and workers that fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.cases import Environments
from benchmarks.runner import Effort, measure, order_of_round, paired_ratios
from benchmarks.worker_process import WorkerError
from tests.benchmarks.sides import fake_case, fake_side

ENVIRONMENTS = Environments()
EFFORT = Effort(num_rounds=3, round_s=4.0, start_limit_s=30.0, answer_limit_s=30.0)


def test_every_side_is_first_once() -> None:
    orders = [order_of_round(3, index) for index in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_sides_train_in_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sides = [fake_side(name, FAKE_LOG=str(log)) for name in ("a", "b")]
    measure(fake_case(*sides), ENVIRONMENTS, EFFORT)
    calls = log.read_text(encoding="utf-8").splitlines()
    assert calls[:4] == ["a 1", "b 1", "a 1", "b 1"]  # compiling, then how long an epoch takes
    assert calls[4:] == ["a 4", "b 4", "b 4", "a 4", "a 4", "b 4"]


def test_ratio_is_above_one_where_we_are_faster() -> None:
    assert paired_ratios([30.0, 20.0], [10.0, 20.0]) == [3.0, 1.0]
    case = fake_case(fake_side("ours", FAKE_EPOCH_S="0.5"), fake_side("reference"))
    ours, reference = measure(case, ENVIRONMENTS, EFFORT)
    assert ours.steps_per_s == (2.0,) * 3
    assert reference.steps_per_s == (1.0,) * 3


def test_noise_on_stdout_is_no_answer() -> None:
    case = fake_case(fake_side("ours", "noisy"), fake_side("reference"))
    ours, _ = measure(case, ENVIRONMENTS, EFFORT)
    assert len(ours.steps_per_s) == 3
    assert min(ours.steps_per_s) > 0


def test_progress_tells_each_turn() -> None:
    told: list[str] = []
    case = fake_case(fake_side("ours"), fake_side("reference"))
    measure(case, ENVIRONMENTS, EFFORT, told.append)
    rounds = Counter(text.split(", ")[-1] for text in told if "round" in text)
    assert rounds == {"ours": 3, "reference": 3}


@pytest.mark.parametrize(
    ("behaviour", "limit_s", "words"),
    [
        ("dies at start", 30.0, r"ended with exit code 1\.(.|\n)*no such device"),
        ("dies later", 30.0, r"ended with exit code 1\.(.|\n)*out of memory"),
        ("hangs", 0.5, r"did not answer within 0\.5 s"),
        ("diverges", 30.0, "trains to a loss of nan"),
    ],
)
def test_failing_worker_is_named(behaviour: str, limit_s: float, words: str) -> None:
    effort = Effort(num_rounds=3, start_limit_s=30.0, answer_limit_s=limit_s)
    bad = fake_side("the bad one", behaviour)
    with pytest.raises(WorkerError, match=f"'the bad one' {words}"):
        measure(fake_case(bad, fake_side("reference")), ENVIRONMENTS, effort)


def test_error_shows_the_command() -> None:
    case = fake_case(fake_side("ours", "dies later"), fake_side("reference"))
    with pytest.raises(WorkerError, match=r"-m tests\.benchmarks\.fake_worker '\{\"workload\""):
        measure(case, ENVIRONMENTS, EFFORT)

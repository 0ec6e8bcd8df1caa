"""What readers of benchmark results rely on: medians, ratios, intervals, verdicts and bounds."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.clusters import allreduce_cases
from benchmarks.compare import Compared, exit_code
from benchmarks.gpu import rows_of
from benchmarks.recovery import Kill, costs_of
from benchmarks.report import (
    Interval,
    Verdict,
    bootstrap,
    make_row,
    make_row_of_times,
    read_ratios,
)
from benchmarks.runner import Effort, Measured, Run, WorkerError, in_turns, order_of_round
from benchmarks.sides import EPOCHS, Case, Environments, Place, Side, Task, jax_side, worker_side
from benchmarks.workers.jax_device import gaps_between
from benchmarks.workers.protocol import StepLine

_WORKER = """
import sys, time
from benchmarks.workers.protocol import arguments, serve_questions
def prepare():
    print("noise")
    if "end" in arguments():
        sys.exit("no such device")
    time.sleep(arguments().get("begin_s", 0))
    return lambda question: {"steps": question["epochs"], "loss": arguments().get("loss", 1.0)}
serve_questions(prepare)
"""


@pytest.mark.parametrize("between_starts", [0.0, 0.05])
def test_interval_contains_the_true_ratio(between_starts: float) -> None:
    generator = np.random.default_rng(3)
    num_hits = 0
    for seed in range(40):
        starts = [
            1.1 * (1 + between_starts * generator.normal()) * (1 + 0.03 * generator.normal(size=7))
            for _ in range(10)
        ]
        interval = bootstrap([list(start) for start in starts], seed)
        num_hits += interval.low <= 1.1 <= interval.high
    assert num_hits >= 34  # 95% promised; a bootstrap of ten starts is a little narrow


def test_rounds_of_one_start_count_less_than_starts() -> None:
    luck = np.random.default_rng(0).normal(1.0, 0.1, size=6)
    many_rounds = bootstrap([[ratio] * 50 for ratio in luck])
    assert many_rounds.high - many_rounds.low > 0.05
    assert bootstrap([[1.0], [2.0, 2.0, 2.0]]) == Interval(2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.97, 1.02, Verdict.HELD),
        (0.90, 0.94, Verdict.BROKEN),
        (0.90, 1.10, Verdict.UNDECIDED),
        (0.95, 0.95, Verdict.HELD),
    ],
)
def test_verdict_at_a_bound_of_five_percent(low: float, high: float, verdict: Verdict) -> None:
    assert Interval(low, low, high).verdict(0.05) is verdict


@pytest.mark.parametrize(
    ("ours", "is_quiet", "failures", "code"),
    [
        (1.1, True, [], 0),
        (0.96, True, [], 0),
        (0.8, True, [], 1),
        (0.8, True, ["a worker ended"], 3),
        (0.8, False, [], 4),  # no verdict while something else runs
    ],
)
def test_exit_code_of_a_comparison(
    ours: float, is_quiet: bool, failures: list[str], code: int
) -> None:
    compared = Compared("case", "steps/s", ([[ours] * 2] * 2, [[1.0] * 2] * 2), [0.0] * 2)
    assert compared.interval.ratio == pytest.approx(ours)
    assert compared.row()["base"] == 1.0
    assert exit_code([compared], failures, 0.05, is_quiet=is_quiet) == code


def test_every_side_is_first_once() -> None:
    orders = [order_of_round(3, index) for index in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    calls: list[str] = []
    measures = [lambda name=name: calls.append(name) or len(calls) for name in "ab"]
    found = in_turns(measures, num_rounds=2, num_dropped=1)
    assert "".join(calls) == "baabba"
    assert found == [[3, 6], [4, 5]]


def test_ratio_is_the_median_of_the_rounds_and_above_one_where_we_are_faster() -> None:
    row = make_row("case", [10.0, 30.0, 20.0], [10.0, 10.0, 40.0], "peer")
    assert (row["ours"], row["reference"]) == (20.0, 10.0)
    assert [row[name] for name in ("ratio", "ratio_min", "ratio_max")] == [1.0, 0.5, 3.0]
    times = make_row_of_times("case", [0.5, 0.5], [1.0], "peer")
    assert (times["ratio"], times["reference_rounds"]) == (2.0, [1.0])


def test_speed_is_that_of_the_slowest_process_and_details_are_medians() -> None:
    (figure,) = EPOCHS.figures.values()
    assert figure(1, [{"steps": 8, "seconds": 2.0}, {"steps": 8, "seconds": 4.0}]) == 2.0
    task = Task(
        question=lambda amount: {},
        figures={},
        details=lambda answers: {"cpu": sum(one["cpu"] for one in answers), **answers[0]},
    )
    rounds = [(1, [{"cpu": cpu}, {"cpu": 1.0}]) for cpu in (1.0, 9.0, 2.0)]
    side = worker_side("ours", "module")
    measured = Measured(side, {}, first=[{"name": "ring"}, {}], rounds=rounds)
    assert measured.details(task) == {"cpu": 2.0, "name": "ring"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end": True}, "ended with exit code 1.*no such device"),
        ({"begin_s": 600}, "did not answer within 3 s"),
        ({"loss": float("nan")}, "trains to a loss of nan"),
    ],
)
def test_a_side_that_fails_is_told_with_its_reason_and_other_cases_go_on(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text(_WORKER)
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}

    def side(name: str, **options: Any) -> Side:
        return Side(name=name, module="told", options=options, variables=paths)

    def case(name: str, ours: Side, **more: Any) -> Case:
        return Case(name=name, ours=ours, references=(side("peer"),), **more)

    limit_s = 3.0 if "begin_s" in options else 300.0
    effort = Effort(num_rounds=2, round_s=0.01, start_limit_s=limit_s)
    run = Run("told", Environments(), effort, Console(quiet=True))
    begin_s = time.monotonic()
    run.compare(case("bad", side("ours", **options)))
    assert time.monotonic() - begin_s < 300
    assert [one["case"] for one in run.failures] == ["bad"]
    assert re.search(f"'ours' {message}", run.failures[0]["error"], re.DOTALL)
    run.effort = Effort(num_rounds=2, round_s=0.01)
    run.compare(case("good", side("ours"), is_fresh="end" in options))
    assert [(row["case"], len(row["ours_rounds"])) for row in run.rows] == [("good", 2)]


def test_sides_of_a_revision_have_its_files_and_nothing_of_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--chosen_by_a_shell")
    side = jax_side("ours", "stratagem_fit", "mlp", Place("cpu", 2))
    variables = Environments().variables(side)
    assert "XLA_FLAGS" not in variables
    assert variables["PYTHONPATH"].startswith(f"{side.folder / 'src'}:{side.folder}")
    # Options that are as usual are left out: an older revision may not know them.
    assert side.options == {"workload": "mlp", "platform": "cpu", "num_devices": 2}


def test_overview_has_the_measured_ratios_alone_the_largest_first(tmp_path: Path) -> None:
    rows = [make_row("slow", [0.5, 0.6], [1.0, 1.0], "peer")]
    rows += [make_row("fast", [2.0, 2.2], [1.0, 1.0], "peer")]
    rows += [make_row("apart", [9.0], [1.0], "one worker") | {"has_peer": False}]
    (tmp_path / "one.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "smallest").mkdir()
    (tmp_path / "smallest" / "one.json").write_text(json.dumps({"rows": rows}))
    fast, slow = read_ratios(tmp_path)
    assert (fast["benchmark"], fast["case"], slow["case"]) == ("one", "fast", "slow")
    assert [fast["interval"].ratio, slow["interval"].ratio] == pytest.approx([2.1, 0.55])
    assert fast["interval"].color != slow["interval"].color
    several = tmp_path / "several" / "run.json"
    several.parent.mkdir()
    several.write_text(json.dumps({"a": {"rows": rows}, "b": {"rows": rows[:1]}}))
    assert [row["benchmark"] for row in read_ratios(several)] == ["a", "a", "b"]


def test_allreduce_compares_what_auto_took_in_the_slowest_process() -> None:
    task = allreduce_cases()[0].tasks[0]
    (figure,) = task.figures.values()
    times_s = {"compiler": 0.002, "ring": 0.001}
    answers = [
        {"seconds": times_s, "chosen": "compiler"},
        {"seconds": {"compiler": 0.004, "ring": 1.0}, "chosen": "compiler"},
    ]
    assert figure(1, answers) == pytest.approx(250)
    assert task.details(answers)["loss of the choice"] == pytest.approx(1.0)


def test_gpu_rows_are_the_wanted_pairs_and_the_first_of_ours_beside_all_others() -> None:
    def side(name: str, speed: float, *, is_ours: bool = False) -> dict[str, object]:
        key = "-".join(f"mlp {name}".replace(",", "").lower().split())
        told = {"first_epoch_s": 1.0, "first_loss": 2.0, "device_kind": "", "num_parameters": 9}
        row = {"key": key, "name": name, "workload": "gpu_mlp", "is_ours": is_ours}
        return {**row, **told, "steps_per_s": [speed] * 2}

    sides = [
        side("fit, 100 a call", 9.0, is_ours=True),
        side("Keras fit, 1 a call", 1.0),
        side("torch.compile", 3.0),
        side("fit, 1 a call", 2.0, is_ours=True),
        {"key": "mlp-failed", "workload": "gpu_mlp", "is_ours": False},
    ]
    rows = rows_of({"plan": {"tiny": True}, "sides": sides})
    assert [(row["reference_name"], row["ratio"]) for row in rows] == [
        ("Keras fit, 1 a call", 9.0),
        ("torch.compile", 3.0),
        ("fit, 1 a call", 4.5),
    ]
    assert [row.get("wanted") for row in rows] == [8.0, None, None]
    assert [row["has_peer"] for row in rows] == [True, True, False]


def test_gaps_are_the_times_without_an_operation() -> None:
    class Operation:
        def __init__(self, name: str, begin_ns: float, end_ns: float) -> None:
            self.name, self.begin_ns, self.end_ns = name, begin_ns, end_ns

    several = [Operation("b", 5, 9), Operation("a", 0, 6), Operation("c", 12, 13)]
    assert gaps_between(several) == [(9, 12, "b", "c")]


def test_costs_of_kills() -> None:
    told = [(10, 1, 1.0), (10, 2, 2.0), (10, 3, 3.0), (10, 4, 3.6), (20, 4, 8.0)]
    steps = [StepLine(0, process_id, step, time_s) for process_id, step, time_s in told]
    assert costs_of([Kill(3.5, 0, 10)], steps) == [(4.5, 1)]
    with pytest.raises(WorkerError, match="No step was done after worker 1 was killed"):
        costs_of([Kill(1.0, 1, 11)], steps[:1])

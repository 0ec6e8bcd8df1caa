"""What readers of benchmark results rely on: medians, ratios, intervals, verdicts and bounds."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.allreduce.measuring import PEER, Cluster, Figures
from benchmarks.allreduce.report import peer_ratios
from benchmarks.checkpoint.report import Figures as Saves
from benchmarks.compare.command import _exit_code
from benchmarks.compare.intervals import Interval, Verdict, bootstrap, noise_of
from benchmarks.compare.rounds import Compared
from benchmarks.first_step.report import FirstStep, Start, describe
from benchmarks.machine import load_warning
from benchmarks.overview import read_ratios
from benchmarks.parameter_server.cases import CASES
from benchmarks.parameter_server.report import Figures as Speeds
from benchmarks.parameter_server.report import make_rows
from benchmarks.recovery.run import Kill, kills_of
from benchmarks.report import make_row, make_row_of_times
from benchmarks.runner import order_of_round, paired_ratios
from benchmarks.worker_process import WorkerError
from benchmarks.workers.step_lines import StepLine


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


def test_noise_is_relative() -> None:
    assert noise_of([[1.0, 1.0], [1.0]]) == 0.0
    assert noise_of([[90.0, 100.0], [110.0]]) == pytest.approx(0.1)


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
    ("ours_s", "busy_cores", "failures", "code"),
    [
        (0.9, 0.0, [], 0),
        (1.04, 0.0, [], 0),
        (1.2, 0.0, [], 1),
        (1.2, 0.0, ["a worker ended"], 3),
        (1.2, 0.8, [], 4),  # no verdict while something else runs
    ],
)
def test_exit_code_of_a_comparison(
    ours_s: float, busy_cores: float, failures: list[str], code: int
) -> None:
    compared = Compared("case", (((ours_s,) * 2,) * 2, ((1.0,) * 2,) * 2), (busy_cores,) * 2)
    assert compared.interval.ratio == pytest.approx(1 / ours_s)
    assert _exit_code([compared], failures, 0.05, Console(file=io.StringIO())) == code


def test_every_side_is_first_once() -> None:
    orders = [order_of_round(3, index) for index in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_ratio_is_the_median_of_the_rounds_and_above_one_where_we_are_faster() -> None:
    assert paired_ratios([30.0, 20.0], [10.0, 20.0]) == [3.0, 1.0]
    row = make_row("case", [10.0, 30.0, 20.0], [10.0, 10.0, 40.0], "peer")
    assert (row["ours"], row["reference"]) == (20.0, 10.0)
    assert [row[name] for name in ("ratio", "ratio_min", "ratio_max")] == [1.0, 0.5, 3.0]
    times = make_row_of_times("case", [0.5, 0.5], [1.0], "peer")
    assert (times["ratio"], times["reference_rounds"]) == (2.0, [1.0])


def test_load_is_reported() -> None:
    assert load_warning(0.1) is None
    assert "not to be trusted" in (load_warning(3.0) or "")


def test_overview_has_the_measured_ratios_alone_the_largest_first(tmp_path: Path) -> None:
    rows = [make_row("slow", [0.5, 0.6], [1.0, 1.0], "peer")]
    rows += [make_row("fast", [2.0, 2.2], [1.0, 1.0], "peer"), {"axis": "replicas"}]
    rows += [make_row("apart", [9.0], [1.0], "one worker") | {"has_peer": False}]
    (tmp_path / "one.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "smallest").mkdir()
    (tmp_path / "smallest" / "one.json").write_text(json.dumps({"rows": rows}))
    fast, slow = read_ratios(tmp_path)
    assert (fast.case, slow.case) == ("fast", "slow")
    assert [fast.interval.ratio, slow.interval.ratio] == pytest.approx([2.1, 0.55])
    assert fast.color != slow.color


def test_first_steps_are_compared_round_by_round_and_held_against_bounds() -> None:
    seconds = {"first_step_cpu_s": [1.0] * 3, "from_start_s": [4.0, 8.0, 10.0]}
    keras = FirstStep(
        workload="MLP",
        name="Keras on JAX",
        is_warm=False,
        wanted=None,
        first_step_s=[2.0, 4.0, 5.0],
        second_step_s=[0.1] * 3,
        **seconds,
    )
    ours = dataclasses.replace(keras, name="Stratagem, 1 device", first_step_s=[3.0, 4.4, 5.0])
    row, _ = describe([ours, keras])
    assert row["ratios"]["first_step_s"] == pytest.approx([1.5, 1.1, 1.0])
    assert row["medians"]["first_step_s"] == 4.4
    start = Start(
        name="two", seconds=[2.8, 3.0], reference_name="one", reference_s=[2.0, 2.0], wanted=1.3
    )
    assert start.ratio == pytest.approx(1.45)
    assert not start.is_as_wanted
    assert dataclasses.replace(start, wanted=1.45).is_as_wanted
    assert not Start(name="import", seconds=[0.05, 0.09, 0.2], wanted_s=0.08).is_as_wanted


def test_allreduce_counts_bandwidth_as_nccl_tests_and_compares_what_auto_took() -> None:
    times_s = {"compiler": 0.002, "ring": 0.001, PEER: 0.0008}
    rounds = [times_s, {"compiler": 0.004, PEER: 0.008}]
    one = Figures(2**20, times_s, "compiler", rounds)
    # 1 MiB in 2 ms; each of two sends all of it once, each of four 1.5 times.
    assert one.bus_bandwidth("compiler", 2) == pytest.approx(524_288_000)
    assert one.bus_bandwidth("compiler", 4) == pytest.approx(786_432_000)
    assert one.loss_of_choice == pytest.approx(1.0)
    assert one.speed_over_peer == pytest.approx(0.4)
    (row,) = peer_ratios({Cluster(2): [one]})
    assert (row["ratio_min"], row["ratio_max"]) == pytest.approx((0.4, 2.0))


@pytest.mark.parametrize(("save_s", "bound_s"), [(5.0, 0.2), (10.0, 0.2), (20.0, 0.4)])
def test_bound_of_a_stall_is_a_fifth_of_a_second_or_a_fiftieth_of_the_save(
    save_s: float, bound_s: float
) -> None:
    assert Saves("ours", {"blocked": save_s}, {}, {}, {}).bound_s == pytest.approx(bound_s)


def test_parameter_servers_have_a_ratio_where_both_sides_were_measured() -> None:
    both = Speeds(CASES[0], ours=[2e6, 4e6, 3e6], peer=[1e6, 1e6, 2e6])
    compared, alone = make_rows([both, dataclasses.replace(both, peer=[])])
    assert [compared[name] for name in ("ratio", "ratio_min", "ratio_max")] == [2.0, 1.5, 4.0]
    assert (alone["ours"], alone["reference"]) == (3e6, None)
    assert "ratio" not in alone


def test_costs_of_kills() -> None:
    told = [(10, 1, 1.0), (10, 2, 2.0), (10, 3, 3.0), (10, 4, 3.6), (20, 4, 8.0)]
    steps = [StepLine(0, process_id, step, time_s) for process_id, step, time_s in told]
    assert kills_of([Kill(3.5, 0, 10)], steps) == [(4.5, 1)]
    with pytest.raises(WorkerError, match="No step was done after worker 1 was killed"):
        kills_of([Kill(1.0, 1, 11)], steps[:1])

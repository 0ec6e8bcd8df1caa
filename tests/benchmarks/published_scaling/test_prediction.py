"""Predicted throughputs, compared with the formulas written out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.published_scaling.figures import Group, PublishedRow, read_groups
from benchmarks.published_scaling.prediction import (
    Program,
    combined,
    machine_of,
    needed_batches,
    predict_throughput,
    scaled_rows,
)
from stratagem.planning.schedule import Reduction

_GROUP = Group(
    title="by hand",
    year=2022,
    model="ResNet-50",
    program="resnet50",
    hardware="DGX A100",
    accelerator="A100",
    devices_per_host=8,
    network_gbit_per_s=1600,
    precision="float16",
    unit="images/s",
    state="mirrored",
    overlap="none",
    source="by hand",
    rows=(PublishedRow(8, 100, 1.0), PublishedRow(4096, 100, 1.0)),
)
_SUM = Reduction("all-reduce.1", num_bytes=10**8, behind=())
_PROGRAM = Program(100, 0.09, 0.01, (_SUM,), "gpu")


def _row(devices: int, batch: int = 100, passes: int = 1) -> PublishedRow:
    return PublishedRow(devices, batch, 1.0, passes)


def _group(**fields: Any) -> Group:
    return dataclasses.replace(_GROUP, **fields)


def _sum_s(num_hosts: int, rounds: int) -> float:
    """A ring of 8 at 0.8 of 300 GB/s, an eighth between hosts at 0.8 of 25 GB/s, and latencies."""
    inside_s = 2 * (7 / 8 * 1e8 / 240e9 + 7 * 2e-6)
    between_s = 2 * ((num_hosts - 1) / num_hosts * 1e8 / 8 / 20e9 + rounds * 15e-6)
    return inside_s + between_s


@pytest.mark.parametrize(
    ("devices", "num_hosts", "rounds"), [(8, 1, 0), (64, 8, 3), (4096, 512, 9)]
)
def test_sums_without_overlap(devices: int, num_hosts: int, rounds: int) -> None:
    predicted = predict_throughput(_GROUP, _row(devices), [_PROGRAM])
    assert predicted == pytest.approx(devices * 100 / (0.1 + _sum_s(num_hosts, rounds)))


def test_one_device_sends_nothing() -> None:
    assert predict_throughput(_GROUP, _row(1), [_PROGRAM]) == pytest.approx(100 / 0.1)


def test_sums_beside_the_backward_pass() -> None:
    """Two thirds of 90 ms of compute hide 3 ms of sums, and no more than 60 ms of long ones."""
    group = _group(overlap="backward")
    assert predict_throughput(group, _row(64), [_PROGRAM]) == pytest.approx(64 * 100 / 0.1)
    long = dataclasses.replace(_PROGRAM, reductions=(dataclasses.replace(_SUM, times=100),))
    exposed_s = 100 * _sum_s(8, 3) - 0.06
    predicted = predict_throughput(group, _row(64), [long])
    assert predicted == pytest.approx(64 * 100 / (0.1 + exposed_s))


def test_only_the_last_pass_sums() -> None:
    predicted = predict_throughput(_GROUP, _row(64, passes=4), [_PROGRAM])
    assert predicted == pytest.approx(64 * 400 / (4 * 0.1 + _sum_s(8, 3)))


def test_efficiency_falls_with_the_number_of_devices() -> None:
    for overlap in ("none", "backward"):
        group = _group(overlap=overlap)
        sizes = [8 * 2**power for power in range(10)]
        each = [predict_throughput(group, _row(size), [_PROGRAM]) / size for size in sizes]
        assert each == sorted(each, reverse=True)


def test_batches_between_two_compiled_ones_are_on_a_line() -> None:
    small = Program(20, 0.03, 0.01, (_SUM,), "gpu")
    group = _group(unit_count=2048)
    predicted = predict_throughput(group, _row(1, batch=60), [small, _PROGRAM])
    assert predicted == pytest.approx(60 * 2048 / (0.06 + 0.01))
    assert predict_throughput(group, _row(1, batch=50), [_PROGRAM]) == pytest.approx(
        50 * 2048 / (0.1 / 2)
    )


def test_batches_that_are_compiled() -> None:
    near = (_row(8, 60), _row(16, 100))
    other = _group(program="bert_large_128", rows=near)
    far = _group(rows=(_row(8, 400), _row(16, 50)))
    assert needed_batches([_GROUP, far, other]) == {
        ("resnet50", "A100"): [50, 400],
        ("bert_large_128", "A100"): [100],
    }


def test_machine_has_the_published_network_and_hosts() -> None:
    target = machine_of(_group(network_gbit_per_s=800, devices_per_host=16), 512)
    assert (target.num_groups, target.devices_per_group) == (32, 16)
    assert target.accelerator.network_bytes_per_s == pytest.approx(6.25e9)
    alone = machine_of(_group(network_gbit_per_s=0), 4)
    assert (alone.num_groups, alone.devices_per_group) == (1, 4)


def test_sharded_in_hosts_sums_shards_between_them() -> None:
    """Within each of 16 hosts as on one; an eighth of 0.8 GB is summed between all of them."""
    scatter = Reduction("reduce-scatter.1", num_bytes=8 * 10**8, behind=(), kind="reduce-scatter")
    gather = Reduction("all-gather.1", num_bytes=4 * 10**8, behind=(), kind="all-gather")
    program = dataclasses.replace(_PROGRAM, reductions=(scatter, gather))
    group = _group(state="sharded in hosts")
    inside_s = 7 / 8 * 12e8 / 240e9 + 2 * 7 * 2e-6
    between_s = 2 * (15 / 16 * 1e8 / 20e9 + 4 * 15e-6)
    predicted = predict_throughput(group, _row(128), [program])
    assert predicted == pytest.approx(128 * 100 / (0.1 + inside_s + between_s))
    alone = predict_throughput(group, _row(8), [program])
    assert alone == pytest.approx(8 * 100 / (0.1 + inside_s))


def test_combined_messages_keep_their_bytes_and_order() -> None:
    sizes = (30, 30, 30, 50, 90)
    sums = [Reduction(f"all-reduce.{size}", num_bytes=size, behind=()) for size in sizes]
    assert [one.num_bytes for one in combined(sums, 64)] == [60, 30, 50, 90]
    assert combined(sums, 0) == sums
    gather = Reduction("all-gather.1", num_bytes=1, behind=(), kind="all-gather")
    assert [one.num_bytes for one in combined([sums[0], gather, sums[1]], 64)] == [30, 1, 30]


def test_program_of_an_answer() -> None:
    sent = {"name": "all-reduce.1", "num_bytes": 10**8, "kind": "all-reduce", "times": 1}
    answer = {
        "batch": 100,
        "compute_s": 0.09,
        "launch_s": 0.01,
        "compiler": "gpu",
        "num_parameters": 25,
        "reductions": [sent],
    }
    assert Program.of(answer) == _PROGRAM


def test_rows_of_groups_without_a_program_are_left_out() -> None:
    groups = read_groups()
    first = groups[0]
    program = Program(first.smallest.batch, 0.1, 0.01, (), "gpu")
    rows = scaled_rows(groups[:1], {(first.program, first.accelerator): [program]})
    assert [row.devices for row in rows] == [row.devices for row in first.rows]
    assert rows[0].predicted_scaling == rows[0].published_scaling == 1
    assert scaled_rows(groups, {}) == []

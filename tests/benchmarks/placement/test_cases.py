"""What is trained, how large it may be, and what is left out where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.placement.cases import CASES, Case, case_on_gpu, table_bytes_for
from benchmarks.placement.run import choose_gpu_case
from benchmarks.workers.memory import free_bytes
from benchmarks.workers.placement_work import training_data

GIGABYTE = 10**9
H200 = {"device_kind": "NVIDIA H200", "gpu_bytes": 142 * GIGABYTE, "host_bytes": 130 * GIGABYTE}


def test_sides_of_a_case_train_the_same_on_two_replicas() -> None:
    for case in CASES:
        assert len({one.options.placement for one in case.sides}) == len(case.sides) == 6
        assert {len(one.options.devices) for one in case.sides} == {2}
        assert {one.options.table_bytes for one in case.sides} == {102_400_000}
        assert len({one.options.optimizer for one in case.sides}) == 1
        assert case.other_device not in case.sides[0].options.devices
        # Of a smaller table the whole is looked up in the replicas' program.
        quick = case.quick().sides[0].options
        assert 65_536 <= quick.num_rows * quick.row_size < 10**6


def test_ids_are_rows_of_the_table_and_some_are_asked_for_often() -> None:
    options = CASES[0].sides[0].options
    ids, targets = training_data(options)
    assert ids.shape == (10 * 1024, 8)
    assert targets.shape == (10 * 1024, 1)
    assert 0 <= ids.min() < ids.max() < options.num_rows
    # A tenth of the rows gets 0.1 ** (1/4) of the lookups.
    assert np.mean(ids < options.num_rows / 10) == pytest.approx(0.1**0.25, abs=0.01)
    np.testing.assert_array_equal(ids, training_data(options)[0])


@pytest.mark.parametrize(
    ("gpu_gb", "host_gb", "table_gb"),
    [(142, 130, 20), (76, 30, 10), (24, 200, 8), (2, 200, None), (80, 0, None)],
)
def test_table_is_as_large_as_memory_allows(
    gpu_gb: int, host_gb: int, table_gb: int | None
) -> None:
    size = table_bytes_for(gpu_gb * GIGABYTE, host_gb * GIGABYTE)
    assert size == (None if table_gb is None else table_gb * GIGABYTE)


def test_table_on_the_host_is_beside_all_on_the_gpu() -> None:
    case = choose_gpu_case(H200)
    assert isinstance(case, Case)
    names = [one.name for one in case.sides]
    assert names[0] == "all on the GPU"
    assert names[-1] == "Mirrored"
    assert [one.options.parameter_device for one in case.sides[:3]] == ["gpu:0", "cpu:0", "cpu:0"]
    assert {one.options.table_bytes for one in case.sides} == {20 * GIGABYTE}
    # Six times the table is what a step takes that makes gradients of all of it.
    smaller = case_on_gpu(20 * GIGABYTE, 119 * GIGABYTE)
    assert [one.name for one in smaller.sides] == names[:-1]


def test_machine_without_gpu_or_memory_says_so() -> None:
    assert choose_gpu_case({**H200, "device_kind": ""}) == "no GPU here"
    reason = choose_gpu_case({**H200, "host_bytes": 2 * GIGABYTE})
    assert reason == "GPU and host have 142.0 GB and 2.0 GB, three tables of 1 GB are needed"


def test_free_memory_is_what_linux_says(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    assert free_bytes(told) == 0
    told.write_text("MemTotal:  900 kB\nMemAvailable:     300 kB\nBuffers: 1 kB\n")
    assert free_bytes(told) == 300 * 1024
    told.write_text("MemTotal:  900 kB\n")
    assert free_bytes(told) == 0

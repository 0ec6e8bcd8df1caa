"""The formula: values by hand, algorithms carried out, and the limits that it must keep."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from benchmarks.scaling.hardware import GpuCluster, constants_of
from benchmarks.scaling.prediction import all_reduce_s, compute_s, messages_bytes, predict
from benchmarks.scaling.programs import Reduction, StepProgram
from tests.benchmarks.scaling.algorithms import Traffic, hierarchical, ring

H100 = GpuCluster()
# Everything is 1 or 0, so that a test can turn on one thing.
PLAIN = GpuCluster(
    gpus_per_host=2,
    bf16_flops_per_s=1.0,
    tf32_flops_per_s=1.0,
    memory_bytes_per_s=1.0,
    nvlink_bytes_per_s=1.0,
    network_bytes_per_s=1.0,
    collective_s=0.0,
    nvlink_latency_s=0.0,
    network_latency_s=0.0,
    combined_bytes=1000,
    compute_share=1.0,
    memory_share=1.0,
    link_share=1.0,
)
STEP = StepProgram(
    title="step",
    batch_size=1,
    num_parameters=25,
    dtype="float32",
    flops=40.0,
    accessed_bytes=30.0,
    reductions=(Reduction(100, "f32"),),
)


def test_by_hand_inside_a_host() -> None:
    # A gigabyte on eight GPUs: 2 * 7/8 of it at 0.8 * 450 GB/s, 14 messages and the start.
    assert all_reduce_s(1e9, 8, H100) == pytest.approx(4.8611e-3 + 16.8e-6 + 4.4e-6, rel=1e-4)


def test_by_hand_between_hosts() -> None:
    # And on 64: an eighth of it at 0.8 * 50 GB/s, 2 * 7/8 of that, 2 * log2(8) messages more.
    between_s = 5.46875e-3 + 51e-6
    assert all_reduce_s(1e9, 64, H100) == pytest.approx(4.8823e-3 + between_s, rel=1e-4)


@pytest.mark.parametrize(("num_gpus", "per_host"), [(2, 2), (4, 4), (8, 2), (8, 4), (32, 8)])
def test_as_much_is_sent_as_the_algorithms_send(num_gpus: int, per_host: int) -> None:
    size = 64
    arrays = [np.random.default_rng(seed).normal(size=size) for seed in range(num_gpus)]
    inside, between = Traffic(), Traffic()
    if num_gpus == per_host:
        summed = ring(arrays, inside)
    else:
        summed = hierarchical(arrays, per_host, inside, between)
    for array in summed:
        np.testing.assert_allclose(array, np.sum(arrays, axis=0), atol=1e-12)
    cluster = dataclasses.replace(
        PLAIN,
        gpus_per_host=per_host,
        nvlink_latency_s=1e3,
        network_latency_s=1e6,
        network_bytes_per_s=1e-9,
    )
    wanted_s = inside.num_elements + 1e9 * between.num_elements
    wanted_s += 1e3 * inside.num_messages + 1e6 * between.num_messages
    assert all_reduce_s(size, num_gpus, cluster) == pytest.approx(wanted_s, rel=1e-12)


def test_computing_is_bound_by_flops_or_by_memory() -> None:
    assert compute_s(STEP, PLAIN) == (40.0, 40.0)
    assert compute_s(dataclasses.replace(STEP, accessed_bytes=50.0), PLAIN) == (40.0, 50.0)
    halved = dataclasses.replace(PLAIN, compute_share=0.5, memory_share=0.3)
    assert compute_s(STEP, halved) == pytest.approx((80.0, 100.0))
    # ResNet-50's three times 2 * 4.1 GFLOP an image, at half of 989.4 TFLOP/s.
    resnet = dataclasses.replace(STEP, dtype="bfloat16", flops=256 * 24.6e9)
    assert compute_s(resnet, H100)[0] == pytest.approx(12.73e-3, rel=1e-3)


def test_one_gpu_exchanges_nothing() -> None:
    prediction = predict(STEP, 1, H100)
    assert prediction.exchange_s == 0
    assert prediction.lowest_efficiency == prediction.highest_efficiency == 1
    computing = (prediction.shortest_compute_s, prediction.longest_compute_s)
    assert computing == compute_s(STEP, H100)


def test_links_without_limit_cost_nothing() -> None:
    cluster = dataclasses.replace(PLAIN, nvlink_bytes_per_s=math.inf, network_bytes_per_s=math.inf)
    assert predict(STEP, 8, cluster).lowest_efficiency == 1


def test_bounds_by_hand() -> None:
    # Two GPUs of a host: 100 bytes, 2 * 1/2 of them, at 1 byte/s, beside 40 to 80 s of computing.
    step = dataclasses.replace(STEP, accessed_bytes=80.0)
    prediction = predict(step, 2, PLAIN)
    assert dataclasses.astuple(prediction) == (2, 40.0, 80.0, 100.0)
    assert prediction.lowest_efficiency == pytest.approx(40 / 140)
    assert prediction.highest_efficiency == pytest.approx(80 / 100)
    long = dataclasses.replace(step, accessed_bytes=200.0)
    assert predict(long, 2, PLAIN).highest_efficiency == 1


def test_twice_the_bytes_take_twice_as_long_but_for_latencies() -> None:
    once_s, twice_s = (all_reduce_s(size, 512, H100) for size in (1e8, 2e8))
    latency_s = all_reduce_s(0, 512, H100)
    assert twice_s - latency_s == pytest.approx(2 * (once_s - latency_s))
    assert latency_s == pytest.approx(4.4e-6 + 14 * 1.2e-6 + 12 * 8.5e-6)


def test_more_gpus_are_never_more_efficient() -> None:
    predictions = [predict(STEP, num_gpus, H100) for num_gpus in (1, 2, 8, 16, 64, 512)]
    for fewer, more in itertools.pairwise(predictions):
        assert more.lowest_efficiency < fewer.lowest_efficiency
        assert more.highest_efficiency <= fewer.highest_efficiency
        assert more.lowest_efficiency <= more.highest_efficiency <= 1


def test_neighbours_are_combined_up_to_the_limit() -> None:
    sizes = [40, 50, 20, 300, 10, 10]
    floats = [Reduction(size, "f32") for size in sizes]
    assert messages_bytes(floats, 100) == [90, 20, 300, 20]
    assert messages_bytes(floats, 0) == sizes
    assert messages_bytes(floats, 1e9) == [sum(sizes)]
    mixed = [Reduction(10, "f32"), Reduction(10, "bf16"), Reduction(10, "bf16")]
    assert messages_bytes(mixed, 100) == [10, 20]
    assert messages_bytes([], 100) == []


def test_each_message_has_its_own_price() -> None:
    cluster = dataclasses.replace(PLAIN, collective_s=7.0, combined_bytes=0)
    step = dataclasses.replace(STEP, reductions=(Reduction(1, "f32"),) * 3)
    assert predict(step, 2, cluster).exchange_s == 3 * (7 + 1)


@pytest.mark.parametrize("num_gpus", [0, -8, 12, 9])
def test_hosts_are_full(num_gpus: int) -> None:
    with pytest.raises(ValueError, match=f"{num_gpus} GPUs in hosts of 8"):
        all_reduce_s(1, num_gpus, H100)


def test_unknown_dtype_has_no_rate() -> None:
    with pytest.raises(ValueError, match="No rate for products in 'int8'"):
        compute_s(dataclasses.replace(STEP, dtype="int8"), H100)


def test_every_constant_says_where_it_comes_from() -> None:
    constants = constants_of(H100)
    assert {constant.name for constant in constants} == set(dataclasses.asdict(H100))
    for constant in constants:
        assert constant.text, constant.name
        assert constant.source, constant.name
        assert constant.value == getattr(H100, constant.name)

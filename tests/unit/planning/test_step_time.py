"""Predicted times, compared with the formulas written out for one case each."""

from __future__ import annotations

import pytest

from stratagem.planning.accelerators import ACCELERATORS
from stratagem.planning.schedule import OperationCost, Reduction
from stratagem.planning.step_time import (
    Assumptions,
    compute_s,
    for_any_size,
    message_s,
    operations_s,
    predict_scaling,
    predict_step,
)
from stratagem.planning.targets import Target, parse_target

# Everything at its peak, and messages for nothing but their bytes.
_IDEAL = Assumptions(
    compute_share=1, memory_share=1, link_share=1, link_latency_s=0, network_latency_s=0
)


def _sum(num_bytes: int, behind: tuple[str, ...] = (), **fields) -> Reduction:
    return Reduction("all-reduce.1", num_bytes, behind, **fields)


def test_ring_on_one_host() -> None:
    """A gigabyte over 450 GB/s: each device sends 2 x 7/8 of it."""
    time_s = message_s(_sum(10**9), parse_target("8xH100"), _IDEAL)
    assert time_s == pytest.approx(2 * 7 / 8 * 1e9 / 450e9)


def test_two_hosts_send_an_eighth_each_over_the_network() -> None:
    time_s = message_s(_sum(10**9), parse_target("16xH100"), _IDEAL)
    assert time_s == pytest.approx(2 * 7 / 8 * 1e9 / 450e9 + 2 * 1 / 2 * (1e9 / 8) / 50e9)


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-gather", "all-to-all"])
def test_half_an_all_reduce(kind) -> None:
    time_s = message_s(_sum(10**9, kind=kind), parse_target("v5e:4x4"), _IDEAL)
    assert time_s == pytest.approx(15 / 16 * 1e9 / 200e9)


def test_groups_say_whether_a_message_leaves_its_slice() -> None:
    target = parse_target("2xv5e:2x2")
    inside = _sum(10**9, groups=((0, 1, 2, 3), (4, 5, 6, 7)))
    between = _sum(10**9, groups=((0, 4), (1, 5), (2, 6), (3, 7)))
    assert message_s(inside, target, _IDEAL) == pytest.approx(2 * 3 / 4 * 1e9 / 200e9)
    assert message_s(between, target, _IDEAL) == pytest.approx(2 * 1 / 2 * 1e9 / 3.125e9)


def test_slices_exchange_a_part_of_each_chip() -> None:
    """A TPU sends to other slices what a chip has of the whole: a quarter of it here."""
    part = _sum(10**9 // 4, leaves_slice=True)
    time_s = message_s(part, parse_target("2xv5e:2x2"), _IDEAL)
    assert time_s == pytest.approx(2 * 1 / 2 * (1e9 / 4) / 3.125e9)
    assert message_s(part, parse_target("v5e:2x2"), _IDEAL) == 0


@pytest.mark.parametrize(
    ("text", "hops"), [("8xH100", 7), ("v5e:16x16", 30), ("v5p:2x2x1", 2), ("1xL4", 0)]
)
def test_hops_of_a_small_message(text, hops) -> None:
    """A ring of GPUs, and one along each axis of a slice."""
    assumed = Assumptions(link_latency_s=1)
    target = parse_target(text)
    assert target.num_hops == hops
    assert message_s(_sum(0), target, assumed) == 2 * hops


def test_groups_of_all_devices_grow_and_groups_of_a_host_stay() -> None:
    target = parse_target("16xH100")
    everyone = _sum(10**9, groups=(tuple(range(16)),))
    pairs = _sum(10**9, groups=tuple((first, first + 1) for first in range(0, 16, 2)))
    grown, stayed = for_any_size([everyone, pairs], target)
    larger = target.of_size(4096)
    assert message_s(grown, larger, _IDEAL) == message_s(_sum(10**9), larger, _IDEAL)
    assert message_s(stayed, larger, _IDEAL) == message_s(pairs, target, _IDEAL)


def test_groups_across_hosts_have_no_other_size() -> None:
    across = _sum(10**9, groups=tuple((first, first + 8) for first in range(8)))
    with pytest.raises(ValueError, match="groups of 2 devices of 2 hosts or slices, out of 16"):
        for_any_size([across], parse_target("16xH100"))


def test_permutation_is_one_hop() -> None:
    one = _sum(10**9, kind="collective-permute")
    assert message_s(one, parse_target("8xH100"), _IDEAL) == pytest.approx(1e9 / 450e9)
    assert message_s(one, parse_target("16xH100"), _IDEAL) == pytest.approx(1e9 / 50e9)


def test_small_message_takes_its_latency() -> None:
    assumed = Assumptions()
    time_s = message_s(_sum(4), parse_target("8xH100"), assumed)
    assert time_s == pytest.approx(2 * 7 * assumed.link_latency_s, rel=0.01)


def test_computing_takes_products_and_bytes() -> None:
    """A petaFLOP in bfloat16 at half of 989.4 TFLOP/s, and 3.3523 TB at 0.8 of the rate."""
    times = compute_s(
        {"bfloat16": 1e15, "float32": 1e12}, 3352.3e9, parse_target("1xH100"), Assumptions()
    )
    assert times == pytest.approx((2 / 0.9894 + 2e-3 / 0.4947, 1 / 0.8), rel=1e-6)


def test_what_travels_behind_products_is_hidden_as_far_as_they_last() -> None:
    target = parse_target("8xH100")
    reductions = [_sum(45 * 10**9, ("dot.1",)), _sum(45 * 10**9)]
    each_s = 2 * 7 / 8 * 45 / 450
    long = predict_step(target, reductions, 3.0, _IDEAL)
    assert long.reduction_s == pytest.approx(2 * each_s)
    assert long.hidden_s == pytest.approx(each_s)
    assert long.step_s == pytest.approx(3 + each_s)
    assert long.shortest_s == pytest.approx(3)
    assert long.efficiency == pytest.approx(3 / (3 + each_s))
    short = predict_step(target, reductions, 0.03, _IDEAL)  # two thirds of it are the backward pass
    assert short.hidden_s == pytest.approx(0.02)
    assert short.most_hidden_s == pytest.approx(0.02)


def test_a_message_that_is_sent_twelve_times() -> None:
    target = parse_target("8xH100")
    once = predict_step(target, [_sum(10**9)], 1.0, _IDEAL).reduction_s
    often = predict_step(target, [_sum(10**9, times=12)], 1.0, _IDEAL).reduction_s
    assert often == pytest.approx(12 * once)


def test_scaling_from_one_device_to_all() -> None:
    times = predict_scaling(parse_target("16xH100"), [_sum(10**9)], 0.1, Assumptions())
    assert [time.num_devices for time in times] == [1, 2, 4, 8, 16]
    assert times[0].step_s == 0.1
    assert times[0].efficiency == 1
    efficiencies = [time.efficiency for time in times]
    assert efficiencies == sorted(efficiencies, reverse=True)
    # Two bytes over the link take half as long in a ring of 2 as in an endless one.
    assert times[1].reduction_s == pytest.approx(1e9 / (450e9 * 0.8) + 2 * 2e-6)


def test_a_message_within_replicas_is_there_on_any_number_of_them() -> None:
    """Pairs exchange, and the first of each pair with those of the others."""
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    firsts = ((0, 2, 4, 6), (1, 3, 5, 7))
    target = parse_target("8xH100")
    inside, between = _sum(10**9, groups=pairs), _sum(10**9, groups=firsts)
    times = predict_scaling(target, [inside, between], 1.0, _IDEAL, devices_per_replica=2)
    assert [time.num_devices for time in times] == [2, 4, 8]
    of_pair = 2 * 1 / 2 * 1e9 / 450e9
    for time, others in zip(times, (0, 2 * 1 / 2, 2 * 3 / 4), strict=True):
        assert time.reduction_s == pytest.approx(of_pair + others * 1e9 / 450e9)


def test_assumptions_are_printed_with_their_figures() -> None:
    assert Assumptions(compute_share=0.4).lines()[0].startswith("0.4 of peak FLOP/s")
    assert len(Assumptions().lines()) == 6


def test_each_operation_is_bound_by_products_or_by_memory() -> None:
    """One takes 2 s of products and 1 s of memory, the other 1 s and 3 s, ten times."""
    rates = parse_target("1xH100").accelerator
    flops, num_bytes = rates.peak_flops_per_s("bfloat16"), rates.memory_bytes_per_s
    costs = [
        OperationCost("bfloat16", 2 * flops, int(num_bytes)),
        OperationCost("bfloat16", flops, int(3 * num_bytes), times=10),
    ]
    target = parse_target("1xH100")
    assert operations_s(costs, target, _IDEAL) == pytest.approx(2 + 10 * 3)
    # The compiler counts a quarter of the bytes: the second is bound by products now.
    assert operations_s(costs, target, _IDEAL, 1 / 4) == pytest.approx(2 + 10 * 1)
    assert operations_s([], target, _IDEAL) == 0


def test_starts_of_kernels_are_a_part_of_each_step() -> None:
    target = parse_target("8xH100")
    each_s = 2 * 7 / 8 * 45 / 450
    alone, together = predict_scaling(target, [_sum(45 * 10**9)], 3.0, _IDEAL, 4, launch_s=0.5)
    assert (alone.num_devices, together.num_devices) == (4, 8)
    assert together.launch_s == 0.5
    assert together.step_s == pytest.approx(3 + 0.5 + each_s)
    assert together.shortest_s == pytest.approx(3.5)
    assert together.efficiency == pytest.approx(3.5 / (3.5 + each_s))
    single = predict_step(target.of_size(1), [], 3.0, _IDEAL, launch_s=0.5)
    assert (single.step_s, single.efficiency) == (3.5, 1)


@pytest.mark.parametrize(
    ("bytes_per_s", "round_trip_s", "measured_s"),
    [(125e6, 0.0, 0.120), (12.5e6, 0.0, 1.2), (125e6, 0.052, 0.275)],
)
def test_sums_over_slow_links_take_the_measured_time(bytes_per_s, round_trip_s, measured_s) -> None:
    """13 MB of Gloo between two hosts; docs/design/local_updates.md has the measurement."""
    assumed = Assumptions(network_bytes_per_s=bytes_per_s, network_latency_s=round_trip_s)
    two_hosts = Target(ACCELERATORS["H100"], num_groups=2, devices_per_group=1)
    assert message_s(_sum(12_970_000), two_hosts, assumed) == pytest.approx(measured_s, rel=0.25)

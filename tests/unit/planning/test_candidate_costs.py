"""Estimates of candidates, on cases whose best choice follows from arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.planning.candidates import (
    Estimate,
    Form,
    PlanCandidate,
    Weight,
    Workload,
    assumptions_of,
    estimate,
    list_candidates,
)
from stratagem.planning.schedule import OperationCost
from stratagem.planning.step_time import Assumptions
from stratagem.planning.targets import parse_target
from stratagem.planning.traced_costs import TracedCosts

_COSTS = TracedCosts(
    operations=(OperationCost("bfloat16", 1e12, 0),),
    activation_bytes=2**20,
    with_gradients_bytes=2**21,
    divided_share=0.0,
    summed_bytes=2**20,
    host_bytes=0.0,
)


def _work(size: int, costs: TracedCosts = _COSTS, batch: int = 64) -> Workload:
    weight = Weight((size, 1024), 4096 * size, 8192 * size)
    costs = dataclasses.replace(costs, with_gradients_bytes=costs.activation_bytes + 4096 * size)
    block = [Weight((2**20,), 2**22)]
    return Workload([weight], {(Form(), 1): costs}, 1, batch, block, 16)


def _best(work: Workload, target: str) -> PlanCandidate:
    machine = parse_target(target)
    found = list_candidates(machine, work.global_batch, [Form()], strategy="MirroredStrategy")
    estimates = {one: estimate(one, work, machine) for one in found}
    return min(found, key=lambda one: (not estimates[one].fits, estimates[one].step_s))


def _candidate(shard_state: str | None, shard_size: int = 8) -> PlanCandidate:
    return PlanCandidate(
        strategy="MirroredStrategy",
        num_replicas=8,
        devices_per_replica=1,
        shard_size=shard_size,
        shard_state=shard_state,
        form=Form(),
    )


def test_memory_of_state_is_arithmetic() -> None:
    work, target = _work(2**20), parse_target("8xH100")  # 2^30 weights
    gib = 2**30
    replicated = estimate(_candidate(None, 1), work, target).memory_bytes
    # Gradients of products in bfloat16 take half of float32.
    assert replicated == pytest.approx(14 * gib, rel=0.01)
    whole = estimate(_candidate("all"), work, target).memory_bytes
    assert whole == pytest.approx(16 / 8 * gib, rel=0.01)
    halves = estimate(_candidate("all", 2), work, target).memory_bytes
    assert halves == pytest.approx(16 / 2 * gib, rel=0.01)


def test_frozen_weights_are_gathered_in_their_own_bytes() -> None:
    """As the int8 base of a model that is tuned with LoRA: no gradient of it is sent or stored."""
    size, target = 2**30, parse_target("8xH100")
    trained, gib = Weight((1024,), 4096), 2**30

    def found(base: Weight, *, is_sharded: bool = True) -> Estimate:
        work = dataclasses.replace(_work(2**10), weights=[trained, base], block=[base])
        candidate = _candidate("all") if is_sharded else _candidate(None, 1)
        return estimate(candidate, work, target)

    int8 = found(Weight((2**20, 1024), size, is_trained=False))
    bfloat16 = found(Weight((2**20, 1024), 2 * size, is_trained=False))
    float32 = found(Weight((2**20, 1024), 4 * size, is_trained=False))
    # A shard, and the gathered weights of two blocks.
    assert int8.memory_bytes == pytest.approx((1 / 8 + 2) * gib, rel=0.01)
    assert bfloat16.memory_bytes == pytest.approx((2 / 8 + 4) * gib, rel=0.01)
    assert float32.memory_bytes == pytest.approx((4 / 8 + 4) * gib, rel=0.01)
    (sent,) = {name for name in int8.seconds if name.startswith("collectives")}
    assert bfloat16.seconds[sent] == pytest.approx(2 * int8.seconds[sent], rel=0.1)
    assert float32.seconds[sent] == pytest.approx(bfloat16.seconds[sent], rel=0.05)
    replicated = found(Weight((2**20, 1024), size, is_trained=False), is_sharded=False)
    assert replicated.seconds[sent] < 0.1 * int8.seconds[sent]  # 16 small messages


def test_what_does_not_fit_replicated_is_sharded() -> None:
    work = _work(12 * 2**20)  # 48 GiB of weights: too large beside an eighth of 96 GiB of slots
    target = parse_target("8xH100")
    replicated = estimate(_candidate(None, 1), work, target)
    assert (replicated.fits, replicated.limit) == (False, "memory")
    assert _best(work, "8xH100").shard_state == "all"


def test_slow_links_between_hosts_keep_shards_inside() -> None:
    """In float32, three messages of the weights cross hosts, or the two halves of one sum."""
    costs = dataclasses.replace(_COSTS, operations=(OperationCost("float32", 1e12, 0),))
    work, machine = _work(2**22, costs), parse_target("32xH100")
    slow = Assumptions(network_bytes_per_s=1e9)
    step_s = {
        size: estimate(
            dataclasses.replace(_candidate("all", size), num_replicas=32), work, machine, slow
        ).step_s
        for size in (8, 32)
    }
    assert step_s[8] < 0.8 * step_s[32]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (_COSTS, "compute"),
        (dataclasses.replace(_COSTS, host_bytes=1e12), "host link"),
        (
            dataclasses.replace(_COSTS, operations=(OperationCost("bfloat16", 1e6, 0),)),
            "collectives over NVLink",
        ),
    ],
)
def test_limit(costs, expected) -> None:
    work = _work(2**18, costs)
    assert estimate(_candidate("all"), work, parse_target("8xH100")).limit == expected


def test_products_alone_reach_the_share_of_the_peak() -> None:
    found = estimate(_candidate(None, 1), _work(0), parse_target("8xH100"))
    assert found.mfu == pytest.approx(Assumptions().compute_share)
    assert found.step_s == pytest.approx(64 / 8 * 1e12 / (989.4e12 / 2))


def test_replicas_of_several_devices_sum_partial_products() -> None:
    work = _work(0)
    work = dataclasses.replace(work, costs={(Form(), 2): _COSTS})
    candidate = dataclasses.replace(_candidate(None, 1), num_replicas=4, devices_per_replica=2)
    found = estimate(candidate, work, parse_target("8xH100"))
    sent_s = found.seconds["collectives over NVLink"]
    assert sent_s == pytest.approx(16 * 2**20 / (450e9 * 0.8) + 64 * 2 * 2e-6)
    assert found.step_s == pytest.approx(found.seconds["compute"] + sent_s)


def test_assumptions_are_those_of_the_accelerator() -> None:
    assert assumptions_of(parse_target("8xH200")).compute_share == Assumptions().compute_share
    given = assumptions_of(parse_target("v5e:4x4"), link_latency_s=1e-3)
    assert given.link_latency_s == 1e-3
    assert given.compute_share > Assumptions().compute_share

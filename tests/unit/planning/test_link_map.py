"""Maps of links: times by hand, messages of the compiled step, and the choice."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.planning import link_map
from stratagem.planning.link_map import LINK_METHODS, LinkMethod, messages_of

TARGET = sg.planning.parse_target("16xH100")
ASSUMED = sg.planning.Assumptions(memory_share=1.0, link_share=1.0, link_latency_s=0.0)
SHAPES = [(1024, 1024), (1024,)]
RATE, LATENCY_S = 1e8, 1e-3


def step_s(method: LinkMethod) -> float:
    found = link_map(
        SHAPES,
        TARGET,
        0.1,
        methods=[method],
        bandwidths_bytes_per_s=[RATE],
        latencies_s=[LATENCY_S],
        assumptions=ASSUMED,
    )
    return found.step_s.item()


def sum_s(num_bytes: float, rounds: int = 2) -> float:
    """One round between two hosts, and 7/8 of the bytes inside each, there and back."""
    inside_s = 7 / 8 * num_bytes / 450e9
    between_s = num_bytes / 8 / 2 / RATE
    return rounds * (inside_s + between_s + LATENCY_S)


def test_seconds_by_hand() -> None:
    whole, vector, memory = 4 * 1024**2, 4 * 1024, 3.35e12
    assert step_s(LinkMethod("lockstep")) == pytest.approx(0.1 + sum_s(whole + vector))
    rest_s = 0.1 + sum_s(vector)
    half = step_s(LinkMethod("half", sg.compression.BFloat16()))
    # Parts there, and sums back, of two bytes an element; six passes over memory.
    assert half == pytest.approx(rest_s + sum_s(whole / 2) + 6 * whole / memory)
    power = step_s(LinkMethod("power", sg.compression.PowerSGD(rank=4)))
    assert power == pytest.approx(rest_s + 2 * sum_s(4 * 1024 * 4) + 6 * whole / memory)
    top = step_s(LinkMethod("top", sg.compression.TopK(fraction=0.01)))
    # All replicas' elements and places, once.
    elements = 16 * int(0.01 * 1024**2) * 8
    assert top == pytest.approx(rest_s + sum_s(elements, rounds=1) + 30 * whole / memory)


def test_local_updates_send_once_a_period() -> None:
    lockstep = step_s(LinkMethod("lockstep")) - 0.1
    diloco = LinkMethod("DiLoCo", local_updates=sg.local_updates.DiLoCo(period=50))
    assert step_s(diloco) == pytest.approx(0.1 + lockstep / 50)
    compressed = LinkMethod(
        "int8", local_updates=sg.local_updates.DiLoCo(period=50, compression="int8")
    )
    int8 = step_s(LinkMethod("int8", sg.compression.Int8())) - 0.1
    assert step_s(compressed) == pytest.approx(0.1 + int8 / 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "int8", "power_sgd", "top_k"])
def test_messages_are_those_of_the_compiled_step(name) -> None:
    def model() -> keras.Model:
        made = keras.Sequential([keras.Input((61,)), keras.layers.Dense(128)])
        made.compile("sgd", "mse")
        return made

    ops = sg.CompressedAllReduce(name)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    batch = (np.ones((8, 61), "float32"), np.ones((8, 128), "float32"))
    plan = sg.plan(model, batch, "4xH100", strategy=strategy)
    assert plan.trained_shapes == ((61, 128), (128,))

    def sizes(messages) -> dict[str, int]:
        kinds = {one.kind for one in messages}
        return {kind: sum(one.num_bytes for one in messages if one.kind == kind) for kind in kinds}

    assert sizes(messages_of(ops.compression, plan.trained_shapes, 4)) == sizes(plan.reductions)


def test_mildest_method_that_is_fast_is_chosen() -> None:
    found = link_map(SHAPES, TARGET, 0.1)
    assert found.step_s.shape == (len(LINK_METHODS), 33, 41)
    for row, column in ((0, 0), (0, 40), (32, 20), (16, 10)):
        times = found.step_s[:, row, column]
        place = found.choices[row, column]
        assert times[place] <= 1.05 * times.min()
        assert all(time > 1.05 * times.min() for time in times[:place])
    assert found.chosen(1e11, 1e-5).name == "lockstep"
    assert found.chosen(1e6, 1e-1).period > 1
    # Slower networks never make a step faster.
    assert np.all(np.diff(found.step_s, axis=2) <= 0)
    assert np.all(np.diff(found.step_s, axis=1) >= 0)


def test_defaults_of_the_target_are_the_plans() -> None:
    def model() -> keras.Model:
        made = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])
        made.compile("sgd", "mse")
        return made

    batch = (np.ones((16, 64), "float32"), np.ones((16, 512), "float32"))
    slow = sg.planning.Assumptions(
        network_bytes_per_s=1e6, network_latency_s=0.05, link_bytes_per_s=1e9
    )
    plan = sg.plan(model, batch, "16xH100", assumptions=slow)
    num_bytes = plan.reduced_bytes
    expected_s = 2 * ((7 / 8 * num_bytes / 1e9 + num_bytes / 16 / 1e6) / 0.8)
    rounds_s = len(plan.reductions) * 2 * (7 * 2e-6 + 0.05)
    assert plan.step.reduction_s == pytest.approx(expected_s + rounds_s)
    assert plan.assumptions.lines()[-1] == "1e+06 bytes/s between hosts or slices"
    found = plan.link_map()
    assert found.target.name == "16xH100"
    assert found.step_s.min() >= plan.step.compute_s
    assert found.chosen(1e6, 0.05).period == 500


@pytest.mark.parametrize(
    ("target", "shapes", "methods"),
    [("8xH100", SHAPES, LINK_METHODS), ("16xH100", [], LINK_METHODS), ("16xH100", SHAPES, [])],
)
def test_map_of_nothing_is_refused(target, shapes, methods) -> None:
    with pytest.raises(ValueError, match=r"A map of links was asked(?s:.)*larger target"):
        link_map(shapes, sg.planning.parse_target(target), 0.1, methods=methods)


@pytest.mark.slow
def test_replicas_of_several_devices_are_refused() -> None:
    with sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    plan = sg.plan(model, (np.ones((16, 4)), np.ones((16, 2))), "16xH100")
    with pytest.raises(ValueError, match="replicas of 2 devices"):
        plan.link_map()

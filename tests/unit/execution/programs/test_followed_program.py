"""Programs that follow a step: when they run, and in which order those beside it do."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import contexts as stack
from stratagem.devices.background import background_flights
from stratagem.devices.lockstep import wait_for_background
from stratagem.execution.context.replica import get_replica_context
from stratagem.execution.programs.followed_program import FollowUpProgram
from stratagem.execution.tracing.functionalize import current_scope


@pytest.fixture
def strategy():
    yield sg.MirroredStrategy(["cpu:0", "cpu:1"])
    background_flights.clear()


def summed(strategy, total):
    """Returns a program that sets a variable to the sum of its argument over the replicas."""

    def add(parts, factor):
        context = get_replica_context()
        change = factor * context.all_reduce("SUM", parts[0])
        with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
            total.assign(total.value + change)

    argument = strategy.topology.stack([np.float32([1, 2]), np.float32([10, 20])])
    return FollowUpProgram(strategy, add, [argument], np.float32(1)), argument


def test_a_program_beside_sets_variables_at_once(strategy) -> None:
    with strategy.scope():
        total = keras.Variable(np.zeros(2, "float32"))
    program, argument = summed(strategy, total)
    first = program.start_beside([argument], np.float32(1))
    second = program.start_beside([argument], np.float32(2))
    np.testing.assert_array_equal(total.value, [33, 66])
    assert [one.token for one in background_flights] == [first, second]
    wait_for_background()
    program.run_after_step([argument], np.float32(3))
    np.testing.assert_array_equal(total.value, [66, 132])
    assert not background_flights


def test_programs_of_other_devices_wait_for_those_in_flight(strategy) -> None:
    for devices in (["cpu:0", "cpu:1"], ["cpu:1", "cpu:2"]):
        own = sg.MirroredStrategy(devices)
        with own.scope():
            total = keras.Variable(np.zeros(2, "float32"))
        program, argument = summed(own, total)
        token = program.start_beside([argument], np.float32(1))
        assert [one.token for one in background_flights] == [token]
        np.testing.assert_array_equal(total.value, [11, 22])


def test_work_follows_each_single_step_and_is_in_a_loop_of_steps(strategy) -> None:
    with strategy.scope():
        number, seen = keras.Variable(0.0), keras.Variable(0.0)
    calls: list[str] = []

    class Work:
        def before_step(self) -> None:
            calls.append(f"before {float(number.value):g}")

        def after_step(self) -> None:
            calls.append(f"after {float(number.value):g}")
            seen.assign(float(number.value))

    work = Work()

    def step(x):
        context, scope = get_replica_context(), current_scope()
        with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
            number.assign(number.value + 1)
            if not scope.leave(work, [seen]):
                seen.assign(number.value)

    dataset = sg.input.Dataset(np.ones((10, 2), "float32"), batch_size=2)
    iterator = iter(strategy.distribute_dataset(dataset))
    strategy.run(step, args=(next(iterator),))
    strategy.run_steps(step, iterator, 3)
    assert calls == ["before 0", "after 1"]
    strategy.run(step, args=(next(iterator),))
    assert calls == ["before 0", "after 1", "before 4", "after 5"]
    assert float(seen.value) == float(number.value) == 5

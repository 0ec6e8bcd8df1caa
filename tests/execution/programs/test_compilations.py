"""Numbers of compiled programs, by strategy and function."""

from __future__ import annotations

import gc
import weakref

import numpy as np

import stratagem as sg
from stratagem.execution.programs.compilations import compilations_of, note_compilation


def test_programs_are_counted_by_strategy_and_name() -> None:
    one, other = sg.OneDeviceStrategy("cpu:0"), sg.OneDeviceStrategy("cpu:0")
    note_compilation(one, "step")
    note_compilation(one, "step")
    note_compilation(other, "step")
    assert compilations_of(one) == {"step": 2}
    assert compilations_of(other) == {"step": 1}
    assert compilations_of(sg.OneDeviceStrategy("cpu:0")) == {}
    compilations_of(one).clear()  # a copy
    assert compilations_of(one) == {"step": 2}


def test_strategy_is_not_held() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    note_compilation(strategy, "step")
    reference = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert reference() is None


def test_each_kind_of_arguments_is_a_program() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def double(x):
        return 2 * x

    for x in (np.float32(1), np.float32(2), np.ones(3, "float32")):
        strategy.run(double, args=(x,))
    (count,) = compilations_of(strategy).values()
    assert count == 2


def test_function_counts_once_with_the_steps_inside() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")

    def inner(x):
        return x + 1

    @sg.function
    def outer(x):
        return strategy.run(inner, args=(x,))

    with strategy.scope():
        assert [int(outer(np.int32(n))) for n in (1, 2)] == [2, 3]
    (name,) = compilations_of(strategy)
    assert name.endswith("outer")
    assert compilations_of(strategy) == {name: 1}

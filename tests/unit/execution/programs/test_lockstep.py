"""Compiled programs: how they are kept, what they close over and donate, many steps a call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.tracing.arguments import flatten_arguments


@pytest.fixture(params=[1, 2])
def strategy(request):
    return sg.MirroredStrategy([f"cpu:{index}" for index in range(request.param)])


@pytest.fixture
def pair():
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def first_part(strategy, value):
    return np.asarray(strategy.local_results(value)[0])


class Step:
    """A replica function that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, x=0.0):
        self.traces += 1
        return x + jnp.ones(())


def test_least_recently_used_program_goes_first(strategy, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PROGRAM_CACHE_SIZE", "2")
    first, second, third = Step(), Step(), Step()
    for step in (first, second, first, third):  # the second is the one not used for longest
        strategy.run(step)
    for step in (first, third):
        strategy.run(step)
    assert (first.traces, second.traces, third.traces) == (1, 1, 1)
    strategy.run(second)
    assert second.traces == 2
    strategy.run(first)
    assert first.traces == 2


def test_bound_counts_programs_and_not_functions(strategy, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PROGRAM_CACHE_SIZE", "1")
    step = Step()
    for size in (1, 2, 1):
        strategy.run(step, args=(np.ones(size, "float32"),))
    assert step.traces == 3


def test_each_strategy_keeps_its_own_programs() -> None:
    step = Step()
    for device in ("cpu:0", "cpu:1"):
        sg.OneDeviceStrategy(device).run(step)
    assert step.traces == 2


def test_bound_methods_and_unhashable_callables_are_found_again(strategy) -> None:
    class Model:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self):
            self.traces = 0

        def __call__(self):
            self.traces += 1
            return jnp.ones(())

    class Trainer:
        traces = 0

        def step(self):
            self.traces += 1
            return jnp.ones(())

    model, trainer = Model(), Trainer()
    for _ in range(3):
        strategy.run(model)
        strategy.run(trainer.step)
    assert (model.traces, trainer.traces) == (1, 1)


def test_new_function_object_is_another_program(strategy) -> None:
    """Closures look alike, but what they close over differs."""
    scaled = [functools.partial(lambda scale: scale * jnp.ones(()), scale) for scale in (2.0, 3.0)]
    assert [float(first_part(strategy, strategy.run(fn))) for fn in scaled] == [2.0, 3.0]


def test_arrays_that_a_function_closes_over_are_its_constants(strategy) -> None:
    of_jax = jnp.arange(3.0)
    of_numpy = np.arange(3.0, dtype="float32") * 10
    of_other_device = jax.device_put(np.float32(100.0), jax.devices()[5])
    number = 1000.0

    def step(x):
        return x + of_jax + of_numpy + of_other_device + number

    for factor in (1.0, 2.0):
        value = strategy.run(step, args=(np.full(3, factor, "float32"),))
        np.testing.assert_array_equal(
            first_part(strategy, value), np.array([0.0, 11.0, 22.0]) + 1100 + factor
        )


def test_shared_argument_on_another_device_is_moved(strategy) -> None:
    elsewhere = jax.device_put(np.arange(2.0, dtype="float32"), jax.devices()[6])
    value = strategy.run(lambda x: x * 2.0, args=(elsewhere,))
    np.testing.assert_array_equal(first_part(strategy, value), [0.0, 2.0])
    assert elsewhere.devices() == {jax.devices()[6]}


def test_results_stay_on_the_devices_of_the_replicas(pair) -> None:
    value = pair.run(lambda: jnp.ones(2))
    assert [part.devices() for part in pair.local_results(value)] == [
        {device} for device in pair.topology.devices
    ]


def test_written_variables_are_donated_and_read_ones_are_not(strategy) -> None:
    with strategy.scope():
        written = sg.Variable(np.ones(4, "float32"), aggregation="sum")
        read = sg.Variable(np.ones(4, "float32"))
    before_written, before_read = written.storage, read.storage
    strategy.run(lambda: written.assign_add(read.value))
    assert before_written.is_deleted()
    assert not before_read.is_deleted()
    assert read.storage is before_read


def test_arguments_and_results_are_not_donated(strategy) -> None:
    with strategy.scope():
        weight = sg.Variable(np.zeros(4, "float32"), aggregation="mean")
    argument = jnp.ones(4)

    def step(x):
        weight.assign_add(x)
        return weight.value

    first = strategy.run(step, args=(argument,))
    second = strategy.run(step, args=(argument,))
    np.testing.assert_array_equal(first_part(strategy, first), np.ones(4))
    np.testing.assert_array_equal(first_part(strategy, second), np.full(4, 2.0))
    assert not argument.is_deleted()


def test_value_that_was_read_before_a_step_is_not_changed_by_it(strategy) -> None:
    with strategy.scope():
        weight = sg.Variable(np.arange(4.0, dtype="float32"), aggregation="sum")
    as_numpy = np.asarray(weight.value)
    for _ in range(3):
        strategy.run(lambda: weight.assign(jnp.full(4, 9.0)))
    np.testing.assert_array_equal(as_numpy, np.arange(4.0))


def test_lowered_program_sums_once_over_all_replicas_of_other_devices(pair) -> None:
    with pair.scope():
        weight = sg.Variable(np.ones(3, "float32"), aggregation="sum")
        own = sg.Variable(1.0, synchronization="on_read", aggregation="sum")

    def step(x, scale):
        weight.assign_add(x * scale)
        own.assign_add(jnp.sum(x))

    value = pair.distribute_values_from_function(lambda _: jnp.ones(3))
    arguments = flatten_arguments((value, 2.0), {}, num_replicas=2)
    others = Topology(tuple(jax.devices()[4:6]))
    compiled = pair.executor.lower(step, arguments, others).compile()
    text = compiled.as_text()
    assert text.count("all-reduce(") + text.count("all-reduce-start(") == 1
    assert float(weight.value[0]) == 1.0
    lowered = pair.executor.program(step, arguments).lower(arguments)
    assert "all_reduce" in lowered.as_text()


def test_constants_of_a_program_first_used_under_jit_stay_usable(strategy) -> None:
    constant = jnp.arange(2.0)

    def step(x):
        return x * constant

    under_jit = jax.jit(lambda x: strategy.reduce("mean", strategy.run(step, args=(x,)), axis=None))
    for factor in (2.0, 3.0):
        np.testing.assert_array_equal(under_jit(jnp.float32(factor)), [0.0, factor])
        value = strategy.run(step, args=(jnp.float32(factor),))
        np.testing.assert_array_equal(first_part(strategy, value), [0.0, factor])

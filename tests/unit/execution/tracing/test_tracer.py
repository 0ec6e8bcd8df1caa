"""What a trace takes along, where variables come from, and what a step may not do to them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.tracer import trace_replica_function


@pytest.fixture(params=[1, 2])
def strategy(request):
    return sg.MirroredStrategy([f"cpu:{index}" for index in range(request.param)])


@pytest.fixture
def pair():
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def first_part(strategy, value):
    return np.asarray(strategy.local_results(value)[0])


def test_only_variables_that_the_function_touches_travel(pair) -> None:
    with pair.scope():
        read, written, both, untouched = (sg.Variable(1.0, aggregation="mean") for _ in range(4))
        own = sg.Variable(1.0, synchronization="on_read", aggregation="sum")

    def step():
        written.assign(read + 1.0)
        both.assign_add(1.0)
        own.assign_add(jnp.float32(1.0))

    arguments = flatten_arguments((), {}, num_replicas=2)
    trace = pair.executor.program(step, arguments).trace
    assert trace.read_only == [read]
    assert {id(variable) for variable in trace.written} == {id(v) for v in (written, both, own)}
    pair.run(step)
    assert [float(v.value) for v in (read, written, both, untouched)] == [1.0, 2.0, 2.0, 1.0]
    assert float(own.value) == 4.0


def test_other_variables_created_later_do_not_matter(pair) -> None:
    with pair.scope():
        weight = sg.Variable(1.0, aggregation="sum")
    traces = []

    def step():
        traces.append(1)
        weight.assign_add(jnp.float32(1.0))

    pair.run(step)
    with pair.scope():
        later = sg.Variable(1.0)
    pair.run(step)
    assert (len(traces), float(weight.value), float(later.value)) == (1, 5.0, 1.0)


def test_assignment_in_a_step_under_jit_is_reported(strategy) -> None:
    with strategy.scope():
        weight = sg.Variable(1.0, aggregation="mean", name="weight")

    @jax.jit
    def outer(x):
        return strategy.run(lambda y: weight.assign_add(y), args=(x,))

    with pytest.raises(RuntimeError, match=r"(?s)inside jax\.jit and assigns variable '.*weight'"):
        outer(jnp.float32(1.0))
    assert float(weight.value) == 1.0
    strategy.run(lambda: weight.assign_add(jnp.float32(1.0)))
    assert float(weight.value) == 2.0


def test_reading_variables_and_closures_works_under_jit(strategy) -> None:
    with strategy.scope():
        weight = sg.Variable(2.0)

    @jax.jit
    def outer(x):
        inner = strategy.run(lambda y: y * weight + x, args=(x,))
        return strategy.reduce("mean", inner, axis=None)

    assert float(outer(jnp.float32(3.0))) == 9.0


def test_assignment_in_an_inner_function_names_the_variable(strategy) -> None:
    with strategy.scope():
        weight = sg.Variable(1.0, aggregation="only_first_replica", name="weight")

    def step(x):
        return jax.lax.cond(x > 0, lambda: weight.assign_add(x), lambda: x)

    with pytest.raises(ValueError, match=r"(?s)weight' was assigned inside .*return the value"):
        strategy.run(step, args=(jnp.float32(1.0),))
    assert float(weight.value) == 1.0


def test_variable_made_on_every_call_is_refused(strategy, execution) -> None:
    kept = []

    def step():
        kept.append(sg.Variable(1.0))
        return kept[-1].value

    with pytest.raises(
        ValueError, match=r"(?s)created variable .* and another one on its second call"
    ):
        strategy.run(step)


def test_failed_first_call_may_be_repeated(strategy, execution) -> None:
    made = []

    def step(fail):
        if not made:
            made.append(sg.Variable(3.0, aggregation="mean"))
        if fail:
            raise LookupError("first")
        made[0].assign_add(1.0)
        return made[0].value

    with pytest.raises(LookupError, match="first"):
        strategy.run(step, args=(True,))
    for expected in (4.0, 5.0):
        assert float(first_part(strategy, strategy.run(step, args=(False,)))) == expected


def test_variable_of_no_strategy_may_be_written_again_and_again(strategy) -> None:
    plain, constant = keras.Variable(1.0), jnp.ones(2)

    def step():
        plain.assign(plain.value + 1.0)
        return constant * plain.value

    for expected in (2.0, 3.0, 4.0):
        np.testing.assert_array_equal(first_part(strategy, strategy.run(step)), [expected] * 2)
    assert float(plain.value) == 4.0


@pytest.mark.parametrize(
    "execution", ["compiled", pytest.param("eager", marks=pytest.mark.slow)], indirect=True
)
def test_layers_random_numbers_differ_by_replica_and_follow_the_seed(pair, execution) -> None:
    generator = keras.random.SeedGenerator(7)

    def draw():
        return keras.random.uniform((4,), seed=generator)

    first = [np.asarray(part) for part in pair.local_results(pair.run(draw))]
    second = [np.asarray(part) for part in pair.local_results(pair.run(draw))]
    drawn = [*first, *second]
    assert all(not np.array_equal(drawn[i], drawn[j]) for i in range(4) for j in range(i))
    alone = keras.random.SeedGenerator(7)
    np.testing.assert_allclose(first[0], keras.random.uniform((4,), seed=alone), rtol=1e-6)


@pytest.mark.parametrize("value", [np.zeros(2, "float32"), [1.0, 2.0], 3.0])
@pytest.mark.parametrize("annotations", [{}, {"synchronization": "on_read", "aggregation": "sum"}])
def test_variables_may_be_created_from_values(strategy, value, annotations) -> None:
    made: list[Any] = []

    def step():
        if not made:
            made.append(sg.Variable(value, **annotations))
        return made[0].value

    np.testing.assert_array_equal(first_part(strategy, strategy.run(step)), value)


def test_initial_value_that_a_step_computes_is_refused(strategy) -> None:
    with pytest.raises(ValueError, match="initial value that a compiled function computes"):
        strategy.run(lambda x: sg.Variable(2.0 * x).value, args=(jnp.ones(2),))
    made: list[Any] = []  # and nothing of it is left

    def step():
        if not made:
            made.append(sg.Variable(1.0))
        return made[0].value

    assert float(first_part(strategy, strategy.run(step))) == 1.0


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_program_does_not_depend_on_variables_that_it_does_not_touch(devices) -> None:
    """They go when Python collects them, which other processes do at other times."""
    strategy = sg.MirroredStrategy(devices)
    with strategy.scope():
        used = sg.Variable(jnp.ones(3))

    def traced():
        arguments = flatten_arguments((), {}, num_replicas=len(devices))
        return trace_replica_function(strategy, lambda: used.assign_add(used * 2.0), arguments)

    alone = traced()
    with strategy.scope():
        other = sg.Variable(jnp.ones((5, 5)))
    beside = traced()
    assert str(beside.jaxpr.in_avals) == str(alone.jaxpr.in_avals) == "[ShapedArray(float32[3])]"
    assert beside.inputs == alone.inputs == [("written", 0)]
    strategy.run(lambda: used.assign_add(used * 2.0))
    np.testing.assert_array_equal(np.asarray(used.value), [3.0] * 3)
    np.testing.assert_array_equal(np.asarray(other.value), np.ones((5, 5)))

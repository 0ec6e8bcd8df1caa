"""What a trace takes along, where variables come from, and what a step may not do to them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.replica_context import ReplicaBatch
from stratagem.execution.tracing.arguments import flatten_arguments


@pytest.fixture(params=[1, 2])
def strategy(request):
    return sg.MirroredStrategy([f"cpu:{index}" for index in range(request.param)])


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


def test_variable_made_on_every_call_is_refused(strategy, execution) -> None:
    kept = []

    def step():
        kept.append(sg.Variable(1.0))
        return kept[-1].value

    words = r"(?s)created variable .* and another one on its second call"
    with pytest.raises(ValueError, match=words):
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


@pytest.mark.parametrize(
    ("value", "annotations"),
    [
        (np.zeros(2, "float32"), {}),
        ([1.0, 2.0], {"synchronization": "on_read", "aggregation": "sum"}),
        (3.0, {}),
    ],
)
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


# Which arguments are split, which are shared, and which are part of the program.


def per_replica(pair, *parts):
    return pair.distribute_values_from_function(
        lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
    )


def flatten(*args, num_replicas=2, **kwargs):
    return flatten_arguments(args, kwargs, num_replicas=num_replicas)


class Mode:
    """Is compared by identity, and needs no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by value")


MODE = Mode()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1.0, 2.0),
        (1, 2),
        (np.float32(1), np.float32(2)),
        (np.ones(2), np.zeros(2)),
        (np.ones(2), np.ones(2, "float32")),  # as JAX has it, without 64 bits
        (jnp.ones(2), np.ones(2, "float32")),
        ("a", "a"),
        ([1.0, "a"], [5.0, "a"]),
        (True, True),
        (None, None),
        (MODE, MODE),
    ],
)
def test_arguments_of_one_program(first, second) -> None:
    one, other = flatten(first), flatten(second)
    assert (one.structure, one.leaves) == (other.structure, other.leaves)
    assert hash(one.leaves) == hash(other.leaves)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (1.0, np.float32(1.0)),  # a Python number lets the other operand decide the dtype
        (1.0, 1.0j),
        (np.ones(2), np.ones(3)),
        (np.ones(2, "float32"), np.ones(2, "int32")),
        ("a", "b"),
        (True, False),
        (None, "a"),
        ([1.0], (1.0,)),
        ({"a": 1.0}, {"b": 1.0}),
        (object(), object()),
        (Mode(), Mode()),
        ("1", b"1"),
    ],
)
def test_arguments_of_different_programs(first, second) -> None:
    one, other = flatten(first), flatten(second)
    assert (one.structure, one.leaves) != (other.structure, other.leaves)


def test_the_batch_is_that_of_the_padded_argument_else_of_the_first_with_rows(pair) -> None:
    scalar = per_replica(pair, 1.0, 2.0)
    full = per_replica(pair, np.ones((3, 2)), np.ones((3, 2)))
    short = per_replica(pair, [1.0, 2.0], [3.0])
    assert flatten(full, short).batch == ReplicaBatch(size=2, lengths=(2, 1))
    assert flatten(scalar, np.ones(5), full).batch == ReplicaBatch(size=3)
    assert flatten(1.0, "text", np.ones(5), np.ones(7)).batch == ReplicaBatch(size=5)
    assert flatten(1.0, scalar, None).batch == ReplicaBatch()

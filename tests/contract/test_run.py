"""`run`: what replica functions are given, what comes back, and how often they are traced."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import (
    assert_parts,
    contribution,
    replica_id,
    replica_ids,
    seldom_eager,
    split,
)

Point = namedtuple("Point", ["x", "y"])


def executions(strategy: sg.Strategy, execution: str) -> int:
    """How often Python runs a replica function in one call: once a program, or once a replica."""
    return 1 if execution == "compiled" else len(replica_ids(strategy))


def test_each_replica_gets_its_component_and_all_get_the_rest(strategy, execution) -> None:
    own = split(strategy, lambda i: jnp.array([i, 10.0 + i]))

    def step(mine, shared, *, scale, offset):
        return scale * mine + shared + offset["a"]

    result = strategy.run(
        step,
        args=[own, np.array([1.0, 2.0], "float32")],
        kwargs={"scale": 2.0, "offset": {"a": jnp.float32(100.0)}},
    )
    assert_parts(strategy, result, lambda i: [2 * i + 101.0, 2 * i + 122.0])


def test_mirrored_argument_is_given_to_every_replica(strategy, execution) -> None:
    everywhere = strategy.extended.broadcast_to(jnp.float32(5.0), None)
    assert isinstance(everywhere, sg.Mirrored)
    result = strategy.run(lambda value: value + replica_id(), args=(everywhere,))
    assert_parts(strategy, result, lambda i: 5.0 + i)


def test_object_that_is_the_same_on_all_replicas_comes_back_as_it_is(strategy, execution) -> None:
    marker = object()
    result = strategy.run(lambda: (7, None, "name", True, marker, 1.5))
    assert result == (7, None, "name", True, marker, 1.5)
    assert [type(one) for one in result[:2]] == [int, type(None)]
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: 7) == 7


def test_results_keep_their_structure_and_its_types(strategy, execution) -> None:
    def step():
        i = replica_id()
        return {
            "point": Point(i, [i + 1.0, None]),
            "ordered": OrderedDict(b=(i,), a="text"),
        }

    result = strategy.run(step)
    assert type(result["point"]) is Point
    assert type(result["point"].y) is list
    assert type(result["ordered"]) is OrderedDict
    assert list(result["ordered"]) == ["b", "a"]
    assert result["ordered"]["a"] == "text"
    assert result["point"].y[1] is None
    assert_parts(strategy, result["point"].x, lambda i: i)
    assert_parts(strategy, result["point"].y[0], lambda i: i + 1)
    assert_parts(strategy, result["ordered"]["b"][0], lambda i: i)


@pytest.mark.filterwarnings("ignore:.*kinds of arguments")
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint32", "float16", "bfloat16"])
def test_dtypes_pass_through(strategy, execution, dtype) -> None:
    own = split(strategy, lambda i: jnp.array([i, 1], dtype))
    result = strategy.run(lambda mine: mine, args=(own,))
    for part in strategy.local_results(result):
        assert part.dtype == jnp.dtype(dtype)
    assert_parts(strategy, result, lambda i: np.array([i, 1]).astype(jnp.dtype(dtype)))


@seldom_eager
def test_random_keys_pass_as_arguments_and_results(strategy, execution) -> None:
    keys = split(strategy, jax.random.key)

    def step(own, shared):
        return jax.random.uniform(own), jax.random.uniform(shared), jax.random.fold_in(own, 1)

    own, shared, folded = strategy.run(step, args=(keys, jax.random.key(5)))
    assert_parts(strategy, own, lambda i: jax.random.uniform(jax.random.key(i)))
    assert_parts(strategy, shared, lambda _: jax.random.uniform(jax.random.key(5)))
    for i, part in zip(replica_ids(strategy), strategy.local_results(folded), strict=True):
        assert (part == jax.random.fold_in(jax.random.key(i), 1)).all()


def test_empty_arrays_complex_numbers_and_scalars_of_numpy_pass(strategy, execution) -> None:
    args = (jnp.zeros((0, 3)), np.int32(4), np.zeros(0, "int8"))
    result = strategy.run(lambda *args: args, args=args)
    # In a program of several devices that has empty results, too, complex ones end the process in
    # XLA's compiler for CPUs (JAX 0.11.2).
    result = (*result, strategy.run(lambda number: number, args=(1 + 2j,)))
    for value, expected in zip(result, (np.zeros((0, 3)), 4, np.zeros(0), 1 + 2j), strict=True):
        if isinstance(value, complex):  # an eager replica hands on the number itself
            assert value == expected
        else:
            assert_parts(strategy, value, lambda _, expected=expected: expected)


def test_one_replica_hands_out_and_takes_plain_values(sole, execution) -> None:
    assert sole.run(lambda: 1.0) == 1.0
    assert isinstance(sole.run(lambda: 1.0), float)
    result = sole.run(lambda x: x + 1.0, args=(jnp.ones(2),))
    assert not isinstance(result, sg.PerReplica)
    np.testing.assert_array_equal(result, [2.0, 2.0])


def test_first_call_traces_once_and_the_second_nothing(strategy, execution) -> None:
    with strategy.scope():
        weight = sg.Variable(1.0, aggregation="sum")
    calls = []

    def step(x):
        calls.append(1)
        weight.assign_add(contribution())
        return weight.value * x

    once = executions(strategy, execution)
    if execution == "compiled" and strategy.topology.devices is None:
        once = 2  # the first trace finds the plain variables that the second has as inputs
    strategy.run(step, args=(jnp.ones(2),))
    assert len(calls) == once
    second = strategy.run(step, args=(np.full(2, 3.0, "float32"),))
    assert len(calls) == (once if execution == "compiled" else 2 * once)
    n = strategy.num_replicas_in_sync
    assert_parts(strategy, second, lambda _: np.full(2, 3.0 * (1 + n * (n + 1))))


def test_other_shape_or_dtype_is_another_program_and_both_are_kept(strategy) -> None:
    calls = []

    def step(x):
        calls.append(x.shape)
        return x

    for value in [jnp.ones(2), jnp.ones(3), jnp.ones(2, "int32"), jnp.zeros(2), jnp.zeros(3)]:
        assert_parts(strategy, strategy.run(step, args=(value,)), lambda _, v=value: v)
    assert calls == [(2,), (3,), (2,)]


def test_python_numbers_are_traced_and_other_objects_are_part_of_the_program(strategy) -> None:
    calls = []

    def step(number, mode):
        calls.append(mode)
        return number * 2 if mode == "double" else number

    got = [
        strategy.run(step, args=args)
        for args in [(1.0, "double"), (5.0, "double"), (5.0, "same"), (6.0, "same")]
    ]
    assert calls == ["double", "same"]
    for value, expected in zip(got, [2.0, 10.0, 5.0, 6.0], strict=True):
        assert_parts(strategy, value, lambda _, expected=expected: expected)


def test_exceptions_come_out_unchanged(strategy, execution) -> None:
    error = KeyError("mine")

    def step():
        raise error

    with pytest.raises(KeyError, match="mine") as caught:
        strategy.run(step)
    assert caught.value is error
    assert not sg.has_strategy()


def test_exception_after_a_collective_comes_out_and_leaves_the_strategy_usable(
    strategy, execution
) -> None:
    def step():
        sg.get_replica_context().all_reduce("sum", contribution())
        raise LookupError("after the sum")

    with pytest.raises(LookupError, match="after the sum"):
        strategy.run(step)
    assert_parts(strategy, strategy.run(replica_id), lambda i: i)


def test_compiled_step_that_fails_assigns_nothing(strategy) -> None:
    with strategy.scope():
        weight = sg.Variable(1.0, aggregation="mean")

    def step():
        weight.assign_add(contribution())
        raise LookupError("too late")

    with pytest.raises(LookupError, match="too late"):
        strategy.run(step)
    assert float(weight.value) == 1.0


@pytest.mark.parametrize(
    "args", [jnp.ones(2), 3.0, {"x": 1.0}, "xy"], ids=lambda a: type(a).__name__
)
def test_args_that_are_no_tuple_or_list_are_refused(strategy, execution, args) -> None:
    with pytest.raises(ValueError, match=r"run received args of type .*\n.*tuple or list"):
        strategy.run(lambda x: x, args=args)


def test_what_cannot_be_called_is_refused(strategy, execution) -> None:
    with pytest.raises(TypeError, match="run received fn=3 of type int"):
        strategy.run(3)


def test_options_of_another_type_are_refused_and_run_options_are_taken(strategy, execution) -> None:
    with pytest.raises(TypeError, match="RunOptions or None"):
        strategy.run(lambda: 1, options={})
    assert strategy.run(lambda: 1, options=sg.RunOptions()) == 1


def test_results_of_different_structure_are_refused_eagerly(distributing) -> None:
    def step():
        context = sg.get_replica_context()
        return {"a": 1.0} if context.replica_id_in_sync_group == 0 else {"a": 1.0, "b": 2.0}

    sg.config.run_eagerly(True)
    try:
        with pytest.raises(ValueError, match=r"(?s)has the structure.*differs at `\['b'\]`"):
            distributing.run(step)
    finally:
        sg.config.run_eagerly(False)


def test_per_replica_is_refused_as_an_array_a_number_or_a_truth_value(distributing) -> None:
    value = split(distributing, lambda i: jnp.float32(i))
    uses = {
        "an array": [np.asarray, jnp.asarray, jnp.sin],
        "a number": [float, int],
        "a truth value": [bool],
    }
    for what, functions in uses.items():
        for use in functions:
            with pytest.raises(ValueError, match=f"(?s)was used as {what}.*local_results.*reduce"):
                use(value)


def test_value_of_another_number_of_replicas_is_refused(distributing) -> None:
    count = distributing.num_replicas_in_sync
    num_devices = jax.local_device_count()
    size = count + 1 if count < num_devices else max(2, num_devices // 2)
    other = sg.MirroredStrategy([f"cpu:{index}" for index in range(size)])
    with pytest.raises(
        ValueError, match=f"Expected one component for each of this strategy's {count}"
    ):
        distributing.run(lambda x: x, args=(split(other, lambda i: jnp.float32(i)),))

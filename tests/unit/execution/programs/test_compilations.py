"""Numbers of compiled programs, by strategy and function."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.lockstep import compilations_of, note_compilation


def step() -> None:
    """Stands for a replica function."""


def test_programs_are_counted_by_strategy_and_name() -> None:
    one, other = sg.OneDeviceStrategy("cpu:0"), sg.OneDeviceStrategy("cpu:0")
    note_compilation([one], step, "first call")
    note_compilation([one, other], step, "new shape")
    assert compilations_of(one) == {"step": 2}
    assert compilations_of(other) == {"step": 1}
    assert compilations_of(sg.OneDeviceStrategy("cpu:0")) == {}
    compilations_of(one).clear()  # a copy
    assert compilations_of(one) == {"step": 2}
    line = step.__code__.co_firstlineno
    assert [str(record) for record in sg.explain_recompiles(one)] == [
        f"step ({__file__}:{line}): first call",
        f"step ({__file__}:{line}): new shape",
    ]


def test_each_program_has_its_reason() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def total(batch, factor, training):
        return batch["x"].sum() * jnp.asarray(factor, batch["x"].dtype)

    batches = [np.ones(shape, dtype) for shape, dtype in ((4, "f4"), (6, "f4"), (6, "i4"))]
    for batch in batches:
        for factor in (2.0, 3.0):  # the second value needs no new program
            strategy.run(total, args=({"x": batch}, factor), kwargs={"training": True})
    strategy.run(total, args=({"x": batches[2]}, 2.0), kwargs={"training": False})
    strategy.run(total, args=({"x": batches[2]}, np.float32(2)), kwargs={"training": False})
    strategy.run(total, args=({"y": batches[0], "x": batches[0]}, 2.0, True))
    with strategy.scope():
        reasons = [record.reason for record in sg.explain_recompiles()]
    assert reasons[:-1] == [
        "first call",
        "args[0]['x']: float32[4] -> float32[6]",
        "args[0]['x']: float32[6] -> int32[6]",
        "kwargs['training']: True -> False",
        "args[1]: float32[]: Python number -> array",
    ]
    assert reasons[-1].startswith("arguments: [")


def test_another_object_and_other_true_rows_are_reasons() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def total(x, option):
        return x.sum()

    class Option:
        def __repr__(self) -> str:
            return "Option()"

    for option in (Option(), Option()):
        strategy.run(total, args=(np.float32(1), option))
    assert strategy_reasons(strategy)[1] == "args[1]: another object, Option()"

    def count(batch):
        return batch.sum()

    for rows in (4, 3):
        (batch,) = strategy.distribute_dataset([np.ones(rows, np.float32)])
        strategy.run(count, args=(batch,))
    assert strategy_reasons(strategy)[2:] == [
        "first call",
        "args[0]: float32[2,2]: all rows -> rows (2, 1)",
    ]


def test_a_callable_object_has_reasons_too() -> None:
    class Total:
        def __call__(self, x):
            return x.sum()

    strategy, total = sg.OneDeviceStrategy("cpu:0"), Total()
    for rows in (4, 3):
        strategy.run(total, args=(np.ones(rows, np.float32),))
    assert strategy_reasons(strategy) == ["first call", "args[0]: float32[4] -> float32[3]"]


def test_random_keys_and_narrow_numbers_have_reasons() -> None:
    """Keys of `jax.random.key` have a dtype that NumPy does not know."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    keys = jax.random.split(jax.random.key(0), 3)

    def identity(x):
        return x

    numbers = jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.int4)
    per_replica = strategy.run(identity, args=(keys[0],))
    for argument in (per_replica, keys, *numbers):
        strategy.run(identity, args=(argument,))
    assert strategy_reasons(strategy) == [
        "first call",
        "args[0]: key<fry>[] -> key<fry>[2]",  # one for each replica
        "args[0]: key<fry>[2] -> key<fry>[3]",
        "args[0]: key<fry>[3] -> bfloat16[3]",
        "args[0]: bfloat16[3] -> int4[3]",
    ]


def strategy_reasons(strategy) -> list[str]:
    return [record.reason for record in sg.explain_recompiles(strategy)]


def test_values_of_a_new_function_are_the_reason() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    for factor in (1.0, 2.0):
        strategy.run(lambda x: x * factor, args=(1.0,))  # noqa: B023 - the case
    assert [record.reason for record in sg.explain_recompiles(strategy)] == [
        "first call",
        "a new function: the values of ['factor'] in it differ",
    ]


@pytest.mark.slow
def test_strategy_is_not_held() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    note_compilation([strategy], step, "first call")
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

"""Mistakes in loops of one's own: each gets the class of the contract and is told what to do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import contribution, split

BATCHES = [np.arange(4.0, dtype="float32")]


def _context() -> Any:
    return sg.get_replica_context()


def _id() -> Any:
    return _context().replica_id_in_sync_group


def _different_structures(strategy: sg.Strategy) -> None:
    sg.config.run_eagerly(True)  # compiled, all replicas are one trace
    try:
        strategy.run(lambda: {"a": 1.0} if _id() else {"b": 1.0})
    finally:
        sg.config.run_eagerly(False)


def _next_in_a_replica(strategy: sg.Strategy) -> None:
    iterator = iter(strategy.distribute_dataset(BATCHES))
    try:
        strategy.run(lambda: next(iterator))
    finally:
        iterator.close()


def _iteration_in_a_replica(strategy: sg.Strategy) -> None:
    dataset = strategy.distribute_dataset(BATCHES)
    strategy.run(lambda: list(dataset))


def _unbatched_numbers(strategy: sg.Strategy) -> None:
    next(iter(strategy.distribute_dataset([np.float32(1.0), np.float32(2.0)])))


def _unbatched_arrays(strategy: sg.Strategy) -> None:
    strategy.distribute_dataset((np.ones((4, 2)), np.ones(4)))


def _batch_axes_that_disagree(strategy: sg.Strategy) -> None:
    next(iter(strategy.distribute_dataset([(np.ones((4, 2)), np.ones(3))])))


def _call_in_a_branch(strategy: sg.Strategy) -> None:
    def total() -> Any:
        return _context().all_reduce("sum", contribution())

    strategy.run(lambda: jax.lax.cond(_id() == 0, total, contribution))


def _call_of_one_replica(strategy: sg.Strategy) -> None:
    def step() -> None:
        if _id() == 0:
            _context().merge_call(lambda _: None)

    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)


def _per_replica_as_an_array(strategy: sg.Strategy) -> None:
    jnp.square(jnp.asarray(split(strategy, float)))


def _per_replica_as_a_number(strategy: sg.Strategy) -> None:
    float(split(strategy, float))


def _per_replica_as_a_condition(strategy: sg.Strategy) -> None:
    if split(strategy, float):
        raise AssertionError


@pytest.mark.parametrize(
    ("mistake", "error", "fix"),
    [
        (_different_structures, ValueError, "return the same keys and lengths on every replica"),
        (_next_in_a_replica, ValueError, "read it outside and pass it"),
        (_iteration_in_a_replica, ValueError, "read it outside and pass it"),
        (_unbatched_numbers, ValueError, "batch the data"),
        (_unbatched_arrays, ValueError, "batch the arrays: sg.input.Dataset"),
        (_batch_axes_that_disagree, ValueError, "batch the data"),
        (_call_in_a_branch, RuntimeError, "call it outside the branch and select"),
        (_call_of_one_replica, RuntimeError, "make these calls on every replica"),
        (_per_replica_as_an_array, ValueError, "use strategy.local_results, strategy.reduce"),
        (_per_replica_as_a_number, ValueError, "use strategy.local_results, strategy.reduce"),
        (_per_replica_as_a_condition, ValueError, "use strategy.local_results, strategy.reduce"),
    ],
)
def test_mistake_is_reported_and_mended(mistake: Any, error: type[Exception], fix: str) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(error, match=f"(?s)Expected.*Fix: .*{fix}"):
        mistake(strategy)
    assert not sg.has_strategy()
    assert float(strategy.reduce("sum", strategy.run(contribution), axis=None)) == 3.0


@pytest.mark.parametrize(
    "name", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
)
def test_methods_that_run_steps_are_refused_in_a_step(distributing, execution, name: str) -> None:
    with distributing.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = split(distributing, lambda _: jnp.ones((2, 1)))
    num_args = 1 if name.startswith("predict") else 2
    fix = f"call Sequential.{name} with the whole batch in place of strategy.run"
    with pytest.raises(RuntimeError, match=f"(?s)that `run` calls on each replica.*Fix: {fix}"):
        distributing.run(lambda x: getattr(model, name)(*[x] * num_args), args=(rows,))
    assert not sg.has_strategy()

"""What distribute_dataset, distribute_datasets_from_function and run_steps refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import mirrored

_PER_REPLICA = sg.InputOptions(replication_mode=sg.InputReplicationMode.PER_REPLICA)


def _iterator(strategy: sg.Strategy) -> sg.DistributedIterator:
    return iter(strategy.distribute_dataset([np.zeros(2)]))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        ([np.zeros(2)], _PER_REPLICA, NotImplementedError, "call distribute_datasets_from_func"),
        ([np.zeros(2)], {"buffer": 1}, TypeError, "options={'buffer': 1} is of type dict"),
        (3, None, TypeError, "3 of type int was passed as a dataset"),
        (np.zeros((2, 2)), None, ValueError, "Unbatched arrays were passed as a dataset"),
    ],
)
def test_dataset_that_cannot_be_distributed_is_refused(
    dataset: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mirrored(2).distribute_dataset(dataset, options)


def test_distributed_dataset_is_not_distributed_again() -> None:
    strategy = mirrored(2)
    with pytest.raises(TypeError, match="received a dataset that is distributed"):
        strategy.distribute_dataset(strategy.distribute_dataset([np.zeros(2)]))


@pytest.mark.parametrize(
    ("dataset_fn", "message"),
    [([1], "received .1. of type list"), (lambda _: None, "dataset_fn returned None")],
)
def test_function_that_makes_no_dataset_is_refused(dataset_fn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mirrored(2).distribute_datasets_from_function(dataset_fn)


@pytest.mark.parametrize("name", ["distribute_dataset", "distribute_datasets_from_function"])
def test_tensorflow_s_long_names_are_the_same(name: str) -> None:
    assert getattr(sg.Strategy, f"experimental_{name}") is getattr(sg.Strategy, name)


def test_datasets_are_not_made_in_a_replica_function() -> None:
    strategy = mirrored(2)
    for wrong in (
        lambda: strategy.distribute_dataset([np.zeros(2)]),
        lambda: strategy.distribute_datasets_from_function(lambda _: [np.zeros(2)]),
        lambda: strategy.run_steps(np.sum, _iterator(strategy), 1),
    ):
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.run(wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"fn": 3}, TypeError, "run_steps received fn=3 of type int"),
        ({"iterator": [1]}, TypeError, r"received iterator=\[1\] of type list"),
        ({"num_steps": 1.5}, TypeError, "received num_steps=1.5 of type float"),
        ({"num_steps": True}, TypeError, "received num_steps=True of type bool"),
        ({"num_steps": 0}, ValueError, "received num_steps=0"),
        ({"iterator": _iterator(mirrored(3))}, ValueError, "received an iterator of Mirrored"),
        ({"reduce": "max"}, ValueError, "is not a reduction"),
    ],
)
def test_steps_that_cannot_be_run_are_refused(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    strategy = mirrored(2)
    call = {"fn": np.sum, "iterator": _iterator(strategy), "num_steps": 1, **wrong}
    with pytest.raises(error, match=message):
        strategy.run_steps(**call)

"""Batches of a worker by their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.keras.worker_data import BatchAssignment, WorkerBatches


def _made(count: int = 5) -> WorkerBatches:
    strategy = sg.OneDeviceStrategy("cpu:0")
    batches = [np.full(2, number) for number in range(count)]
    return WorkerBatches(lambda: strategy.distribute_datasets_from_function(lambda _: batches))


def _numbers(batches: list[Any]) -> list[int]:
    return [int(batch.whole()[0]) for batch in batches]


def test_function_that_runs_again_gets_the_same_batches() -> None:
    made = _made()
    assert _numbers(made.take(BatchAssignment(0, 0, 0, 2))) == [0, 1]
    assert _numbers(made.take(BatchAssignment(0, 0, 2, 2))) == [2, 3]
    assert _numbers(made.take(BatchAssignment(0, 0, 2, 2))) == [2, 3]
    assert _numbers(made.take(BatchAssignment(0, 0, 4, 1))) == [4]
    assert _numbers(made.take(BatchAssignment(0, 1, 0, 1))) == [0]


def test_worker_that_was_started_anew_goes_on_where_it_was() -> None:
    made = _made()
    assert _numbers(made.take(BatchAssignment(0, 3, 3, 1))) == [3]


def test_looking_ahead_takes_nothing() -> None:
    made = _made()
    assert made.cardinality() == 5
    assert made.look(0, 3) == 3
    assert int(made.peek(BatchAssignment(0, 0, 1, 1))[0]) == 1
    assert _numbers(made.take(BatchAssignment(0, 0, 0, 2))) == [0, 1]
    assert made.look(0, 20) == 5
    assert made.look(0, 3) == 3
    assert _numbers(made.take(BatchAssignment(0, 0, 2, 3))) == [2, 3, 4]
    assert made.look(1, 20) == 5


def test_last_batch_comes_again_where_others_wait() -> None:
    made = _made()
    assert _numbers(made.take(BatchAssignment(0, 0, 3, 2, (0.5, 0.5, 0.0)))) == [3, 4, 4]
    assert _numbers(made.take(BatchAssignment(0, 0, 5, 0, (0.0, 0.0)))) == [4, 4]
    assert _numbers(_made().take(BatchAssignment(0, 0, 5, 0, (0.0,)))) == [4]  # in a new process


def test_dataset_that_has_become_shorter_is_reported() -> None:
    made = _made(3)
    with pytest.raises(RuntimeError, match="of worker 1 ended after 3 batches, but had"):
        made.take(BatchAssignment(1, 0, 2, 2))

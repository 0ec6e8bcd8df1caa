"""Distributed datasets and their iterators: per-replica batches and resuming."""

from __future__ import annotations

import gc
import itertools
import json
import math
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from tests.parity.comparison import mirrored

_PER_REPLICA = sg.InputReplicationMode.PER_REPLICA


def _parts(batch: Any) -> list[list[Any]]:
    parts = batch.components if isinstance(batch, sg.PerReplica) else (batch,)
    return [np.asarray(part).tolist() for part in parts]


def _numbers(num_examples: int, batch_size: int, **options: Any) -> sg.input.Dataset:
    return sg.input.Dataset(np.arange(num_examples), batch_size=batch_size, **options)


def _flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


@settings(max_examples=40, deadline=None)
@given(
    num_examples=st.integers(1, 40),
    batch_size=st.integers(1, 20),
    num_replicas=st.integers(1, 8),
    shuffle=st.booleans(),
    buffer_size=st.integers(0, 3),
)
def test_replicas_together_see_every_example_once_and_in_order(
    num_examples: int, batch_size: int, num_replicas: int, shuffle: bool, buffer_size: int
) -> None:
    source = _numbers(num_examples, batch_size, shuffle=shuffle, seed=3)
    plain = [batch.tolist() for batch in source]
    dataset = mirrored(num_replicas).distribute_dataset(
        _numbers(num_examples, batch_size, shuffle=shuffle, seed=3),
        sg.InputOptions(per_replica_buffer_size=buffer_size),
    )
    batches = [_parts(batch) for batch in dataset]
    assert [_flat(parts) for parts in batches] == plain
    assert sorted(_flat(plain)) == list(range(num_examples))
    for parts, batch in zip(batches, plain, strict=True):
        size = math.ceil(len(batch) / num_replicas)
        expected = [batch[i * size : (i + 1) * size] for i in range(num_replicas)]
        assert parts == expected
    assert len(dataset) == dataset.cardinality == len(plain)


@given(num_examples=st.integers(1, 30), num_replicas=st.integers(2, 5))
@settings(max_examples=15, deadline=None)
def test_batches_from_a_function_go_to_replicas_in_turn(
    num_examples: int, num_replicas: int
) -> None:
    seen: list[sg.InputContext] = []

    def dataset_fn(context: sg.InputContext) -> sg.input.Dataset:
        seen.append(context)
        return _numbers(num_examples, context.get_per_replica_batch_size(2 * num_replicas))

    dataset = mirrored(num_replicas).distribute_datasets_from_function(dataset_fn)
    assert seen == [sg.InputContext(num_replicas_in_sync=num_replicas)]
    local = [batch.tolist() for batch in _numbers(num_examples, 2)]
    local += [[]] * (-len(local) % num_replicas)
    steps = range(0, len(local), num_replicas)
    assert [_parts(batch) for batch in dataset] == [local[i : i + num_replicas] for i in steps]
    assert len(dataset) == len(steps)


def test_per_replica_datasets_last_until_the_longest_has_ended() -> None:
    contexts: list[sg.InputContext] = []

    def dataset_fn(context: sg.InputContext) -> sg.input.Dataset:
        contexts.append(context)
        return _numbers(2 * context.input_pipeline_id + 1, 2)

    dataset = mirrored(2).distribute_datasets_from_function(
        dataset_fn, sg.InputOptions(replication_mode=_PER_REPLICA)
    )
    assert contexts == [sg.InputContext(2, 0, 2), sg.InputContext(2, 1, 2)]
    assert [_parts(batch) for batch in dataset] == [[[0], [0, 1]], [[], [2]]]
    assert len(dataset) == 2
    iterator = iter(dataset)
    next(iterator)
    again = iter(dataset)
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    assert _parts(next(again)) == [[], [2]]


def test_batches_can_stay_on_the_host() -> None:
    strategy = mirrored(2)
    dataset = strategy.distribute_dataset(
        _numbers(3, 3), sg.InputOptions(experimental_fetch_to_device=False)
    )
    (batch,) = dataset
    assert isinstance(batch.stacked, np.ndarray)
    assert dataset.element_spec.dtype == np.int64
    counted = strategy.run(lambda rows: sg.get_replica_context().num_examples, args=(batch,))
    assert _parts(counted) == [2, 1]
    assert int(strategy.reduce("sum", batch, axis=0)) == 3


@pytest.mark.compatibility
def test_element_spec_has_no_batch_size_and_the_dtypes_of_the_devices() -> None:
    data = {"x": np.zeros((6, 2), "float64"), "n": np.zeros(6, "uint8")}
    dataset = mirrored(2).distribute_dataset(sg.input.Dataset(data, batch_size=4))
    for spec in (dataset.element_spec, iter(dataset).element_spec):
        assert spec["x"] == sg.input.ArraySpec((None, 2), "float32")
        assert spec["n"] == sg.input.ArraySpec((None,), "uint8")


def test_looking_at_the_spec_of_a_generator_loses_nothing() -> None:
    dataset = mirrored(2).distribute_dataset(np.full(2, i) for i in range(3))
    assert dataset.element_spec == sg.input.ArraySpec((None,), "int32")
    assert dataset.cardinality == sg.input.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match=r"len\(\) was called on a distributed dataset of unknown"):
        len(dataset)
    assert [_parts(batch) for batch in dataset] == [[[i], [i]] for i in range(3)]
    with pytest.raises(ValueError, match="ended after 3 batches"):  # a generator is read once
        list(dataset)


def test_get_next_and_its_optional_form_tell_the_end() -> None:
    iterator = iter(mirrored(2).distribute_dataset(_numbers(4, 2)))
    assert _parts(iterator.get_next()) == [[0], [1]]
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert _parts(optional.get_value()) == [[2], [3]]
    end = iterator.get_next_as_optional()
    assert not end.has_value()
    with pytest.raises(
        sg.errors.OutOfRangeError, match="The distributed dataset has no more batches"
    ):
        end.get_value()
    with pytest.raises(sg.errors.OutOfRangeError, match="create a new iterator with iter"):
        iterator.get_next()
    assert next(iterator, None) is None


def test_reduce_folds_the_batches_of_an_epoch() -> None:
    strategy = mirrored(2)
    dataset = strategy.distribute_dataset(_numbers(7, 3))
    total = dataset.reduce(0, lambda s, batch: s + int(strategy.reduce("sum", batch, axis=0)))
    assert total == 21


def test_data_is_not_taken_in_a_replica_function() -> None:
    strategy = mirrored(2)
    dataset = strategy.distribute_dataset(_numbers(4, 2))
    iterator = iter(dataset)
    for wrong in (lambda: next(iterator), iterator.get_next, lambda: iter(dataset)):
        with pytest.raises(ValueError, match="Fix: read it outside and pass it"):
            strategy.run(wrong)


@pytest.mark.parametrize("buffer_size", [0, 1])
def test_batches_before_an_error_are_not_lost_in_a_group(buffer_size: int) -> None:
    def batches() -> Any:
        yield from np.arange(6.0).reshape(3, 2)
        raise OSError("no such file")

    strategy = mirrored(2)
    options = sg.InputOptions(per_replica_buffer_size=buffer_size)
    iterator = iter(strategy.distribute_dataset(batches(), options))
    sums = strategy.run_steps(lambda rows: rows.sum(), iterator, 2, reduce="sum")
    assert sums.tolist() == [1, 5]
    assert strategy.run_steps(_total, iterator, 2, reduce="sum").tolist() == [9]
    with pytest.raises(OSError, match="no such file"):
        strategy.run_steps(lambda rows: rows.sum(), iterator, 2, reduce="sum")


def test_leaving_a_loop_early_leaves_no_thread_and_closes_the_source() -> None:
    is_closed = threading.Event()

    def batches() -> Any:
        try:
            while True:
                yield np.zeros(2)
        finally:
            is_closed.set()

    dataset = mirrored(2).distribute_dataset(batches())
    for _ in dataset:
        break
    del dataset
    gc.collect()
    assert is_closed.wait(120)  # the fixture of all tests looks for the thread


def _total(rows: Any) -> Any:
    return rows.sum()

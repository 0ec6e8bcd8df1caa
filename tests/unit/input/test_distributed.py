"""Distributed datasets and their iterators: per-replica batches and resuming."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import threading
from collections.abc import Iterable
from typing import Any

import jax
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


def test_epochs_of_a_shuffled_dataset_differ_and_are_reproducible() -> None:
    def orders() -> list[list[int]]:
        dataset = mirrored(2).distribute_dataset(_numbers(10, 3, shuffle=True, seed=1))
        return [_flat(_flat(_parts(batch)) for batch in dataset) for _ in range(3)]

    first = orders()
    assert first == orders()
    assert len({tuple(order) for order in first}) == 3


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


def test_one_replica_gets_plain_arrays() -> None:
    for strategy in (mirrored(1), sg.OneDeviceStrategy("cpu:1"), sg.get_strategy()):
        batches = list(strategy.distribute_dataset(_numbers(5, 2)))
        assert all(isinstance(batch, jax.Array) for batch in batches)
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


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


def test_replica_context_knows_the_rows_of_a_distributed_batch() -> None:
    strategy = mirrored(3)
    (batch,) = strategy.distribute_dataset(_numbers(4, 8))

    def rows(_: Any) -> Any:
        context = sg.get_replica_context()
        return context.num_examples, context.global_num_examples, context.example_mask.sum()

    local, everywhere, masked = strategy.run(rows, args=(batch,))
    assert _parts(local) == [2, 2, 0] == _parts(masked)
    assert strategy.local_results(everywhere) == (4,)


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


def test_length_that_is_not_known_has_no_len() -> None:
    dataset = mirrored(2).distribute_dataset(iter([np.zeros(2)]))
    assert dataset.cardinality == sg.input.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match=r"len\(\) was called on a distributed dataset of unknown"):
        len(dataset)


@pytest.mark.parametrize("num_read", [0, 2, 5])
def test_iterator_resumes_from_another_one(num_read: int) -> None:
    def dataset() -> sg.DistributedDataset:
        return mirrored(2).distribute_dataset(_numbers(17, 4, shuffle=True, seed=5))

    undisturbed = dataset()
    list(undisturbed)  # the second epoch is the one that is disturbed
    expected = [_parts(batch) for batch in undisturbed]
    following = [_parts(batch) for batch in undisturbed]

    disturbed = dataset()
    list(disturbed)
    iterator = iter(disturbed)
    assert [_parts(next(iterator)) for _ in range(num_read)] == expected[:num_read]
    state = json.loads(json.dumps(iterator.get_state()))

    restored = dataset()
    again = iter(restored)
    again.set_state(state)
    assert [_parts(batch) for batch in again] == expected[num_read:]
    assert [_parts(batch) for batch in restored] == following


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


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_ten_thousand_batches_grow_neither_memory_nor_threads() -> None:
    strategy = mirrored(2)
    dataset = strategy.distribute_dataset(_numbers(200, 20, shuffle=True))

    def epoch() -> None:
        for batch in dataset:
            strategy.run(_total, args=(batch,))

    for _ in range(100):
        epoch()
    gc.collect()
    before, threads = _resident_bytes(), threading.active_count()
    for _ in range(1_000):
        epoch()
    gc.collect()
    assert _resident_bytes() - before < 20 * 2**20
    assert threading.active_count() <= threads + 1  # the last one may be about to end


def _total(rows: Any) -> Any:
    return rows.sum()

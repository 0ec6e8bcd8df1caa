"""Sharding over processes: together they read everything once, in steps that add up.

Each process is stood in for by a strategy of its own with its share of the replicas.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.errors import InvalidArgumentError
from stratagem.input.distributed import DistributedDataset
from stratagem.input.sharding import InputShard
from stratagem.input.sources.adapters import as_source

FILES = [f"part-{index}" for index in range(5)]


def ids_of(file: str) -> np.ndarray:
    """The examples of a file: 0 to 6, 100 to 106, and so on."""
    return 100 * int(file.removeprefix("part-")) + np.arange(7)


def read(files: list[str]) -> Any:
    """Batches of 6 across file boundaries."""
    return sg.input.Dataset(np.concatenate([ids_of(file) for file in files]), batch_size=6)


def shards(
    dataset: Any, num_workers: int, num_local: int, policy: sg.AutoShardPolicy
) -> list[InputShard]:
    """The shard of each worker."""
    count = num_workers * num_local
    return [
        InputShard.of(as_source(dataset), policy, sg.InputContext(num_workers, worker, count))
        for worker in range(num_workers)
    ]


def steps_of(shard: InputShard) -> list[list[list[int]]]:
    """The ids of each replica of a worker in each step."""
    return [
        [part.tolist() for part in batch.parts(shard.num_local_replicas)] for batch in shard.open(0)
    ]


def test_data_is_the_stated_table() -> None:
    dataset = sg.input.Dataset(np.arange(8), batch_size=4)
    workers = shards(dataset, 2, 1, sg.AutoShardPolicy.DATA)
    assert [steps_of(worker) for worker in workers] == [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]]


@given(
    num_examples=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    num_workers=st.integers(2, 4),
    num_local=st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_data_splits_each_batch_over_all_replicas(
    num_examples: int, batch_size: int, num_workers: int, num_local: int
) -> None:
    dataset = sg.input.Dataset(np.arange(num_examples), batch_size=batch_size)
    workers = shards(dataset, num_workers, num_local, sg.AutoShardPolicy.DATA)
    steps = zip(*(steps_of(worker) for worker in workers), strict=True)
    together = [[part for worker in step for part in worker] for step in steps]
    alone = sg.InputContext(num_replicas_in_sync=num_workers * num_local)
    assert together == steps_of(InputShard.of(as_source(dataset), sg.AutoShardPolicy.DATA, alone))


@given(
    num_examples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 3),
    num_local=st.integers(1, 2),
    repeats=st.integers(1, 3),
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_batches_read_at_once_are_those_read_one_by_one(
    num_examples: int,
    batch_size: int,
    num_workers: int,
    num_local: int,
    repeats: int,
    counts: list[int],
) -> None:
    rows = {"x": np.arange(num_examples), "none": None, "y": -np.arange(num_examples)}
    dataset = sg.input.Dataset(rows, batch_size=batch_size, shuffle=True).repeat(repeats)
    for worker in shards(dataset, num_workers, num_local, sg.AutoShardPolicy.DATA):
        reader, batches = worker.open(0), []
        for count in itertools.cycle(counts):
            found = reader.next_many(count, 1)
            if found is not None:
                steps, number = found
                assert 1 <= number == len(steps.batches()) <= count
                batches += steps.batches()
            elif (batch := next(reader, None)) is None:
                break
            else:
                batches.append(batch)
            assert reader.num_read == len(batches)
        expected = list(worker.open(0))
        assert [batch.signature for batch in batches] == [one.signature for one in expected]
        for batch, one in zip(batches, expected, strict=True):
            for got, wanted in zip(batch.arrays, one.arrays, strict=True):
                np.testing.assert_array_equal(got, wanted)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=4, max_size=6),
    batch_size=st.integers(1, 13),
    num_workers=st.integers(2, 4),
    num_local=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_files_are_read_once_and_steps_use_the_global_batch(
    sizes: list[int], batch_size: int, num_workers: int, num_local: int
) -> None:
    files = {f"{index}": 100 * index + np.arange(size) for index, size in enumerate(sizes)}

    def make(names: list[str]) -> Any:
        ids = np.concatenate([files[name] for name in names])
        return sg.input.Dataset(ids, batch_size=batch_size)

    dataset = sg.input.Dataset.from_files(list(files), make)
    workers = shards(dataset, num_workers, num_local, sg.AutoShardPolicy.FILE)
    read_by = [steps_of(worker) for worker in workers]
    for index, steps in enumerate(read_by):
        own = [example for step in steps for part in step for example in part]
        names = list(files)[index::num_workers]
        assert own == [example for name in names for example in files[name].tolist()]
        assert len(steps) == workers[index].cardinality
        for step in steps:
            assert max(map(len, step)) - min(map(len, step)) <= 1
    num_whole = (
        min(sum(len(files[n]) for n in list(files)[w::num_workers]) for w in range(num_workers))
        // batch_size
    )
    for step in range(num_whole * num_workers):
        assert sum(len(part) for steps in read_by for part in steps[step]) == batch_size


def test_automatic_choice_takes_files_where_there_are_enough() -> None:
    dataset = sg.input.Dataset.from_files(FILES, read)
    first = [steps_of(worker)[0][0] for worker in shards(dataset, 3, 1, sg.AutoShardPolicy(0))]
    assert first == [[0, 1], [100, 101], [200, 201]]
    first = [steps_of(worker)[0][0] for worker in shards(dataset, 6, 1, sg.AutoShardPolicy(0))]
    assert first == [[0], [1], [2], [3], [4], [5]]
    with pytest.raises(InvalidArgumentError, match="for 6 workers and a dataset with 5 files"):
        shards(dataset, 6, 1, sg.AutoShardPolicy.FILE)
    with pytest.raises(InvalidArgumentError, match="no known files"):
        shards(read(FILES), 2, 1, sg.AutoShardPolicy.FILE)


def test_off_gives_everything_to_everybody() -> None:
    dataset = sg.input.Dataset(np.arange(9), batch_size=4)
    for worker in shards(dataset, 2, 1, sg.AutoShardPolicy.OFF):
        steps = steps_of(worker)
        assert [example for step in steps for part in step for example in part] == list(range(9))
        assert len(steps) == worker.cardinality == 6  # two steps a batch, of two examples each


@pytest.mark.parametrize("kind", ["arrays", "sequence", "grain"])
def test_hint_is_filled_in_by_whoever_distributes(kind: str) -> None:
    examples: Any = np.arange(10)
    if kind == "sequence":
        examples = [np.int64(number) for number in range(10)]
    if kind == "grain":
        examples = grain.MapDataset.source(list(range(10)))
    dataset = sg.input.Dataset(examples, batch_size=4)
    hinted = dataset.shard(sg.input.SHARD_HINT, sg.input.SHARD_HINT)
    workers = shards(hinted, 2, 1, sg.AutoShardPolicy.HINT)
    assert [steps_of(worker) for worker in workers] == [
        [[[0, 2]], [[4, 6]], [[8]], [[]]],
        [[[1, 3]], [[5, 7]], [[]], [[9]]],
    ]
    assert [batch.tolist() for batch in hinted] == [batch.tolist() for batch in dataset]
    assert len(hinted) == 3
    assert [batch.tolist() for batch in dataset.shard(3, 1)] == [[1, 4, 7]]
    with pytest.raises(ValueError, match="without a shard hint"):
        shards(dataset, 2, 1, sg.AutoShardPolicy.HINT)


def test_shard_that_makes_no_sense_is_refused() -> None:
    dataset = sg.input.Dataset(np.arange(10), batch_size=4)
    for numbers in ((0, 0), (2, 2), (2, -1), (sg.input.SHARD_HINT, 0)):
        with pytest.raises(ValueError, match="shard received num_shards="):
            dataset.shard(*numbers)
    with pytest.raises(ValueError, match="made from batches"):
        sg.input.Dataset([np.arange(2)]).shard(2, 0)
    with pytest.raises(ValueError, match="The list of files is empty"):
        sg.input.Dataset.from_files([], read)
    with pytest.raises(TypeError, match="auto_shard_policy="):
        sg.InputOptions(auto_shard_policy=2)  # pyright: ignore[reportArgumentType]


def test_replicas_must_be_spread_evenly() -> None:
    dataset = as_source(sg.input.Dataset(np.arange(10), batch_size=4))
    with pytest.raises(ValueError, match="5 replicas do not divide evenly over 2 workers"):
        DistributedDataset(
            sg.get_strategy(),
            dataset,
            is_global=True,
            options=sg.InputOptions(),
            context=sg.InputContext(2, 0, 5),
        )


def of_worker(dataset: Any, worker: int, policy: sg.AutoShardPolicy) -> DistributedDataset:
    """The dataset of one of two workers with two replicas each."""
    return DistributedDataset(
        sg.MirroredStrategy(["cpu:0", "cpu:1"]),
        as_source(dataset),
        is_global=True,
        options=sg.InputOptions(auto_shard_policy=policy),
        context=sg.InputContext(2, worker, 4),
    )


def ids_in(batches: Any) -> list[list[int]]:
    return [np.concatenate(batch.components).tolist() for batch in batches]


@pytest.mark.parametrize("policy", [sg.AutoShardPolicy.FILE, sg.AutoShardPolicy.DATA])
@pytest.mark.parametrize("kind", ["arrays", "grain"])
def test_each_worker_resumes_with_the_next_example(policy: sg.AutoShardPolicy, kind: str) -> None:
    def of_grain(files: list[str]) -> Any:
        ids = np.concatenate([ids_of(file) for file in files])
        return grain.MapDataset.source(ids).seed(3).shuffle().to_iter_dataset().batch(6)

    dataset = sg.input.Dataset.from_files(FILES, read if kind == "arrays" else of_grain)
    expected = ids_in(of_worker(dataset, 1, policy))
    for stop in range(len(expected)):
        iterator = iter(of_worker(dataset, 1, policy))
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        resumed = iter(of_worker(dataset, 1, policy))
        resumed.set_state(state)
        assert ids_in(resumed) == expected[stop:]


def test_source_that_cannot_be_resumed_raises_also_when_sharded() -> None:
    dataset = sg.input.Dataset.from_files(FILES, lambda files: (ids_of(file) for file in files))
    iterator = iter(of_worker(dataset, 0, sg.AutoShardPolicy.FILE))
    next(iterator)
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        iterator.get_state()
    iterator.close()


def test_one_process_reads_everything_whatever_the_policy() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    for policy in sg.AutoShardPolicy:
        options = sg.InputOptions(auto_shard_policy=policy)
        dataset = strategy.distribute_dataset(read(FILES), options)
        assert sum(len(ids) for ids in ids_in(dataset)) == 35


def test_parts_of_as_many_rows_and_another_size_do_not_move_together() -> None:
    """Of 4 examples worker 1 has a whole part of 2; of 3 it has 1 of 2; of 5 it has 2 of 3."""
    batches = [np.arange(4), np.arange(5), np.arange(3)]
    strategy = sg.OneDeviceStrategy("cpu:0")
    dataset = DistributedDataset(
        strategy,
        as_source(batches),
        is_global=True,
        options=sg.InputOptions(auto_shard_policy=sg.AutoShardPolicy.DATA),
        context=sg.InputContext(2, 1, 2),
    )
    assert [np.asarray(batch).tolist() for batch in dataset] == [[2, 3], [3, 4], [2]]
    groups = list(iter(dataset).take(3))
    assert [group.num_steps for group in groups] == [1, 1, 1]

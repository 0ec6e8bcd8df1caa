"""Prefetching: order, buffer size, errors, and no leaked threads."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.errors import InvalidArgumentError
from stratagem.input import iterator as prefetch
from stratagem.input.distributed import DistributedDataset, InputShard
from stratagem.input.iterator import Prefetcher
from stratagem.input.sources.adapters import as_source

# How long a test waits for a thread before it fails.
_LIMIT_S = 120.0


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stratagem-prefetch"]


def _counter(last: int) -> Callable[[], int]:
    numbers = iter(range(last))
    return lambda: next(numbers)


@pytest.mark.parametrize("handover_s", [0.0, 1e-9, 10.0])
@pytest.mark.parametrize("buffer_size", [0, 1, 3])
def test_items_come_in_order_and_end(buffer_size: int, handover_s: float) -> None:
    prefetcher = Prefetcher(_counter(20), buffer_size, handover_s=handover_s)
    assert [prefetcher.take() for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetcher.take()


def test_buffer_is_filled_and_not_beyond() -> None:
    loaded = itertools.count()
    has_loaded = threading.Semaphore(0)

    def load() -> int:
        number = next(loaded)
        has_loaded.release()
        return number

    prefetcher = Prefetcher(load, 2)
    assert prefetcher.take() == 0
    for _ in range(3):
        assert has_loaded.acquire(timeout=_LIMIT_S)
    assert not has_loaded.acquire(timeout=0.05), "more than two items wait"
    assert prefetcher.take() == 1
    assert has_loaded.acquire(timeout=_LIMIT_S)
    prefetcher.close()


class _Clock:
    """Stands while a test does not move it."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(prefetch, "time", made)
    return made


def test_fast_items_are_loaded_by_the_consumer_until_many_are_slow(clock: _Clock) -> None:
    seconds = iter([0.3, 0.0, 0.0, 0.1, 0.0, 0.0, 0.1, 0.1, 0.1, *[0.0] * 4])
    loaders: list[str] = []

    def load() -> int:
        clock.now_s += next(seconds)
        loaders.append(threading.current_thread().name)
        return len(loaders)

    prefetcher = Prefetcher(load, 1, handover_s=0.02)
    assert [prefetcher.take() for _ in range(13)] == list(range(1, 14))
    with pytest.raises(StopIteration):
        prefetcher.take()
    own = threading.current_thread().name
    assert loaders == [own] * 9 + ["stratagem-prefetch"] * 4


def test_consumer_that_takes_its_time_gets_a_thread(clock: _Clock) -> None:
    loaders: list[str] = []

    def load() -> None:
        loaders.append(threading.current_thread().name)

    prefetcher = Prefetcher(load, 1, handover_s=0.02)
    for pause_s in (0.1, 0.0, 0.0, 0.1, 0.1, 0.1):
        prefetcher.take()
        clock.now_s += pause_s
    prefetcher.take()
    assert loaders == [threading.current_thread().name] * 7
    prefetcher.take()
    prefetcher.close()
    assert set(loaders[7:]) == {"stratagem-prefetch"}


@pytest.mark.parametrize(
    ("buffer_size", "handover_s", "loads_early"),
    [(0, 0.0, False), (1, 0.0, False), (1, 10.0, False), (1, 10.0, True)],
)
def test_error_is_raised_after_the_batches_before_it(
    buffer_size: int, handover_s: float, loads_early: bool
) -> None:
    error = OSError("disk")
    numbers = iter(range(2))

    def load() -> int:
        for number in numbers:
            return number
        raise error

    prefetcher = Prefetcher(load, buffer_size, handover_s=handover_s, loads_early=loads_early)
    assert [prefetcher.take(), prefetcher.take()] == [0, 1]
    with pytest.raises(OSError, match="disk") as raised:
        prefetcher.take()
    assert raised.value is error
    with pytest.raises(StopIteration):
        prefetcher.take()
    for thread in _threads():
        thread.join(_LIMIT_S)
    assert not _threads()


def test_error_keeps_nothing_of_whoever_sees_it_alive() -> None:
    prefetcher = Prefetcher(_counter(1), 1)
    mine = threading.Event()  # stands for anything in this frame
    gone = weakref.ref(mine)

    def read(_: object) -> None:
        prefetcher.take()
        with contextlib.suppress(StopIteration):
            prefetcher.take()

    gc.disable()
    try:
        read(mine)
        del mine
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("loads_early", [False, True])
@pytest.mark.parametrize("num_taken", [0, 1])
def test_closed_prefetcher_gives_nothing_more_and_gives_up_once(loads_early, num_taken) -> None:
    given_up: list[int] = []
    prefetcher = Prefetcher(
        _counter(20), 2, lambda: given_up.append(1), handover_s=10.0, loads_early=loads_early
    )
    assert [prefetcher.take() for _ in range(num_taken)] == list(range(num_taken))
    prefetcher.close()
    prefetcher.close()
    assert given_up
    assert not _threads()
    with pytest.raises(StopIteration):
        prefetcher.take()


def test_thread_in_the_middle_of_a_slow_source_ends_after_it() -> None:
    may_go_on, is_loading = threading.Event(), threading.Event()
    numbers = itertools.count()

    def load() -> int:
        number = next(numbers)
        if number:
            is_loading.set()
            may_go_on.wait(_LIMIT_S)
        return number

    prefetcher = Prefetcher(load, 1)
    assert prefetcher.take() == 0
    assert is_loading.wait(_LIMIT_S)
    (thread,) = _threads()
    del prefetcher
    assert thread.is_alive()
    may_go_on.set()
    thread.join(_LIMIT_S)
    assert not thread.is_alive()
    assert next(numbers) == 2, "it loaded on"


def _close(prefetchers: list[Prefetcher]) -> None:
    prefetchers[0].close()


def _end_process(_: list[Prefetcher]) -> None:
    prefetch._end_all()


@pytest.mark.parametrize("end", [_close, list.clear, _end_process])
def test_load_that_waits_for_others_is_given_up(end: Callable[[list[Prefetcher]], None]) -> None:
    is_waiting, is_given_up = threading.Event(), threading.Event()
    numbers = itertools.count()

    def load() -> int:
        number = next(numbers)
        if number:
            is_waiting.set()
            assert is_given_up.wait(_LIMIT_S), "nobody gave it up"
            raise StopIteration
        return number

    prefetchers = [Prefetcher(load, 2, is_given_up.set)]
    assert prefetchers[0].take() == 0
    assert is_waiting.wait(_LIMIT_S)
    (thread,) = _threads()
    end(prefetchers)
    assert is_given_up.is_set()
    thread.join(_LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.slow
def test_process_ends_while_a_source_is_read() -> None:
    program = (
        "import itertools, stratagem as sg, numpy as np\n"
        "strategy = sg.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "data = strategy.distribute_dataset(np.full(8, i) for i in itertools.count())\n"
        "iterator = iter(data)\n"
        "print(next(iterator))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "PerReplica[[0 0 0 0] | [0 0 0 0]]"
    assert not run.stderr


@pytest.mark.parametrize("handover_s", [0.0, 1e-9, 10.0])
def test_early_item_is_loaded_before_the_one_before_it_is_returned(handover_s: float) -> None:
    loaded: list[int] = []
    count = _counter(20)

    def load() -> int:
        loaded.append(count())
        return loaded[-1]

    prefetcher = Prefetcher(load, 1, handover_s=handover_s, loads_early=True)
    for number in range(20):
        assert prefetcher.take() == number
        if handover_s == 10.0:  # without a thread
            assert loaded == [*range(min(number + 2, 20))]
    with pytest.raises(StopIteration):
        prefetcher.take()


# Sharding over processes: together they read everything once, in steps that add up.

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
    for policy in sg.AutoShardPolicy:  # one process has everything whatever the policy
        alone = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        batches = alone.distribute_dataset(dataset, sg.InputOptions(auto_shard_policy=policy))
        assert sum(len(ids) for ids in ids_in(batches)) == 9
    with pytest.raises(ValueError, match="5 replicas do not divide evenly over 2 workers"):
        DistributedDataset(
            sg.get_strategy(),
            as_source(dataset),
            is_global=True,
            options=sg.InputOptions(),
            context=sg.InputContext(2, 0, 5),
        )


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


def of_worker(
    dataset: Any, worker: int, policy: sg.AutoShardPolicy, num_local: int = 2
) -> DistributedDataset:
    """The dataset of one of two workers with some replicas each."""
    return DistributedDataset(
        sg.MirroredStrategy(["cpu:0", "cpu:1"][:num_local]),
        as_source(dataset),
        is_global=True,
        options=sg.InputOptions(auto_shard_policy=policy),
        context=sg.InputContext(2, worker, 2 * num_local),
    )


def test_parts_of_as_many_rows_and_another_size_do_not_move_together() -> None:
    """Of 4 examples worker 1 has a whole part of 2; of 3 it has 1 of 2; of 5 it has 2 of 3."""
    batches = [np.arange(4), np.arange(5), np.arange(3)]
    dataset = of_worker(batches, 1, sg.AutoShardPolicy.DATA, num_local=1)
    assert [np.asarray(batch).tolist() for batch in dataset] == [[2, 3], [3, 4], [2]]
    assert [group.num_steps for group in iter(dataset).take(3)] == [1, 1, 1]


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
    once = sg.input.Dataset.from_files(FILES, lambda files: (ids_of(file) for file in files))
    iterator = iter(of_worker(once, 0, policy))
    next(iterator)
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        iterator.get_state()
    iterator.close()

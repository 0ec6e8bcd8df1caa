"""Datasets that input workers read: policies, several consumers, positions, and bad options."""

from __future__ import annotations

import collections
import itertools
import json
import sys
import threading
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.splits import (
    ShardingPolicy,
    SourceFacts,
    facts_of,
    file_of_split,
    plan_splits,
    read_split,
)
from tests.unit.input.service.servers import bucketed, coordinated, input_servers, values

_LIMIT_S = 60


def _files(num_files: int, batches_per_file: int = 3) -> sg.input.Dataset:
    def read(files: list[int]) -> list[np.ndarray]:
        return [
            np.array([10 * file + number]) for file in files for number in range(batches_per_file)
        ]

    return sg.input.Dataset.from_files(list(range(num_files)), read)


@pytest.fixture(scope="module")
def servers():
    with input_servers(2) as servers:
        yield servers


@pytest.mark.slow
def test_off_is_plain_iteration_once_per_worker() -> None:
    dataset = sg.input.Dataset(np.arange(7), batch_size=2, shuffle=True, seed=3)
    with input_servers(1) as servers:
        distributed = servers.distribute(dataset, "parallel_epochs")
        for epoch in range(2):
            assert values(distributed) == values(dataset.as_source().open(epoch))
        servers.workers.append(servers.add_worker())
        found = values(distributed)
    assert sorted(found) == sorted(2 * values(dataset.as_source().open(2)))


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(
            sg.input.Dataset(np.arange(2000), batch_size=3, shuffle=True), marks=pytest.mark.slow
        ),
        sg.input.Dataset(np.arange(7), batch_size=2).repeat(3),
        sg.input.Dataset([np.full(2, number) for number in range(5)]),
        sg.input.Dataset(np.arange(0), batch_size=2),
        _files(5),
        _files(3).repeat(2),
        sg.input.Dataset.from_generator(lambda: (np.full(1, n) for n in range(9))),
    ],
    ids=["arrays", "repeated", "list", "empty", "files", "repeated files", "generator"],
)
def test_dynamic_visits_each_batch_once(servers, dataset) -> None:
    distributed = servers.distribute(dataset, exactly_once=True)
    for epoch in range(2):
        assert sorted(values(distributed)) == sorted(values(dataset.as_source().open(epoch)))


def test_infinite_datasets_have_no_end(servers) -> None:
    dataset = sg.input.Dataset(np.arange(4), batch_size=2).repeat()
    distributed = servers.distribute(dataset)
    assert distributed.cardinality == sg.input.INFINITE_CARDINALITY
    batches = iter(distributed)
    found = values(next(batches) for _ in range(100))
    batches.close()
    assert {tuple(batch) for batch in found} == {(0, 1), (2, 3)}
    assert 40 <= found.count([0, 1]) <= 60
    files = iter(servers.distribute(_files(2).repeat()))
    assert {next(files).item() for _ in range(40)} == {0, 1, 2, 10, 11, 12}
    files.close()
    empty = sg.input.Dataset(np.arange(0), batch_size=2).repeat()
    assert values(servers.distribute(empty)) == []


def test_static_policies_divide_the_data_among_listed_workers() -> None:
    hint = sg.input.SHARD_HINT
    hinted = sg.input.Dataset(np.arange(7), batch_size=2).shard(hint, hint)
    cases: list[tuple[ShardingPolicy, sg.input.Dataset, list[list[Any]]]] = [
        (ShardingPolicy.FILE, _files(3, 2), [[0, 1, 20, 21], [10, 11]]),
        (ShardingPolicy.DATA, _files(3, 2), [[0, 10, 20], [1, 11, 21]]),
        (ShardingPolicy.FILE_OR_DATA, _files(3, 2), [[0, 1, 20, 21], [10, 11]]),
        (ShardingPolicy.FILE_OR_DATA, _files(1, 4), [[0, 2], [1, 3]]),
    ]
    with input_servers(2, worker_addresses=["127.0.0.1", "127.0.0.1:%port%"]) as servers:
        for policy, dataset, parts in cases:
            found = [batch.item() for batch in servers.distribute(dataset, policy)]
            assert sorted(found) == sorted([*itertools.chain.from_iterable(parts)])
            for part in parts:  # the order within a worker is that of its part
                assert [one for one in found if one in part] == part
        found = values(servers.distribute(hinted, ShardingPolicy.HINT, exactly_once=True))
        assert sorted(found) == [[0, 2], [1, 3], [4, 6], [5]]
        with pytest.raises(sg.errors.InvalidArgumentError, match=r"2 workers .* with 1 files"):
            list(servers.distribute(_files(1), ShardingPolicy.FILE))
        with pytest.raises(ValueError, match=r"A worker at 127.0.0.1:.* asked to join"):
            servers.add_worker()


def test_static_policies_need_a_list_of_workers(servers) -> None:
    dataset = servers.distribute(_files(3), ShardingPolicy.FILE)
    with pytest.raises(ValueError, match="the dispatcher has no list of workers"):
        next(iter(dataset))


def test_consumers_with_one_job_name_share_each_epoch(servers) -> None:
    dataset = sg.input.Dataset(np.arange(300), batch_size=1)
    found: list[list[Any]] = [[], []]

    def consume(number: int) -> None:
        distributed = servers.distribute(dataset, job_name="shared", exactly_once=True)
        for _ in range(2):
            found[number] += values(distributed)

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
    assert sorted(found[0] + found[1]) == sorted(2 * [[number] for number in range(300)])


def test_consumers_of_one_job_must_want_the_same(servers) -> None:
    dataset = sg.input.Dataset(np.arange(300), batch_size=1)
    first = iter(servers.distribute(dataset, job_name="job of arrays"))
    next(first)
    other = servers.distribute(_files(2), job_name="job of arrays")
    with pytest.raises(ValueError, match=r"asked for the job 'job of arrays' with .*dataset_id"):
        next(iter(other))
    first.close()


def test_coordinated_consumers_have_one_length_in_each_step(servers) -> None:
    dataset = bucketed(6, [4, 3, 2, 1, 5, 6])
    steps = coordinated(servers, dataset, "coordinated", exactly_once=True)
    assert all(first.shape[1] == second.shape[1] for first, second in steps)
    # The last group of 3, 1 and 5 batches is completed by a batch without rows.
    assert sum(len(batch) == 0 for step in steps for batch in step) == 3
    found = [batch[0, 0] for step in steps for batch in step if len(batch)]
    assert sorted(found) == sorted(batch[0, 0] for batch in dataset)
    # Consecutive batches of one split, and the same order again.
    assert all(len(b) == 0 or b[0, 0] == a[0, 0] + 1 for a, b in steps)
    again = coordinated(servers, dataset, "coordinated again")
    assert [values(step) for step in again] == [values(step) for step in steps]


def test_coordinated_reads_with_off_take_turns_with_the_workers(servers) -> None:
    dataset = sg.input.Dataset([np.full(1, number) for number in range(4)])
    steps = coordinated(servers, dataset, "coordinated off", mode="parallel_epochs")
    assert [values(step) for step in steps] == [
        [[0], [1]],
        [[0], [1]],
        [[2], [3]],
        [[2], [3]],
    ]


def test_registered_datasets_are_read_by_id(servers) -> None:
    dataset = sg.input.Dataset({"x": np.arange(6.0), "s": np.array(list("abcdef"))}, batch_size=2)
    dataset_id = sg.input.service.register_dataset(servers.target, dataset, dataset_id="letters")
    assert dataset_id == "letters"
    found = sg.input.service.from_dataset_id("distributed_epoch", servers.target, dataset_id)
    assert found.element_spec == dataset.element_spec
    assert found.cardinality == sg.input.UNKNOWN_CARDINALITY
    batches = list(found)
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in ("x", "s")}
    order = np.argsort(joined["x"])
    np.testing.assert_array_equal(joined["s"][order], list("abcdef"))
    with pytest.raises(ValueError, match="dataset_id='letters' is registered"):
        sg.input.service.register_dataset(servers.target, _files(2), dataset_id="letters")
    unknown = sg.input.service.from_dataset_id("distributed_epoch", servers.target, "none")
    with pytest.raises(sg.errors.NotFoundError, match="dataset_id='none' is not registered"):
        next(iter(unknown))


def test_strategies_train_on_the_batches(servers) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = servers.distribute(
        sg.input.Dataset(np.arange(11.0, dtype="float32"), batch_size=4), exactly_once=True
    )
    assert len(distributed) == 3
    batches = iter(strategy.distribute_dataset(distributed))
    total = float(strategy.reduce("sum", next(batches), axis=0))
    state = json.loads(json.dumps(batches.get_state()))
    batches.close()
    again = iter(strategy.distribute_dataset(distributed))
    again.set_state(state)
    total += sum(float(strategy.reduce("sum", batch, axis=0)) for batch in again)
    assert total == sum(range(11))


def test_known_length_only_where_it_is_promised(servers) -> None:
    dataset = sg.input.Dataset(np.arange(7), batch_size=2)
    assert servers.distribute(dataset, exactly_once=True).cardinality == 4
    for options in ({}, {"job_name": "length", "exactly_once": True}):
        assert servers.distribute(dataset, **options).cardinality == sg.input.UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fastest"}, "'fastest' is no sharding policy"),
        ({"consumer_index": 0}, "num_consumers=None"),
        ({"consumer_index": 0, "num_consumers": 2}, "job_name=None"),
        ({"consumer_index": 2, "num_consumers": 2, "job_name": "a"}, "2 is out of range for 2"),
        ({"job_name": ""}, "job_name is empty"),
        ({"max_outstanding_requests": 0}, "max_outstanding_requests=0"),
        ({"mode": "parallel_epochs", "exactly_once": True}, "each worker reads all data"),
        ({"mode": ShardingPolicy.HINT}, "without a shard hint"),
    ],
)
def test_bad_options(servers, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        servers.distribute(sg.input.Dataset(np.arange(3), batch_size=1), **options)


def test_data_that_cannot_be_sent_or_repeated_are_refused(servers) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to input workers"):
        servers.distribute(sg.input.Dataset.from_generator(lambda: [lock]))

    class Batches:
        def __iter__(self):
            return iter([np.arange(2)])

    assert values(servers.distribute(sg.input.Dataset(Batches()))) == [[0, 1]]
    with pytest.raises(ValueError, match="may have other batches when it is read again"):
        servers.distribute(sg.input.Dataset(Batches()), exactly_once=True)


@pytest.mark.parametrize("compression", ["AUTO", None, "zstd"])
def test_compression_changes_no_batch(servers, compression) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    dataset = sg.input.Dataset(np.arange(2**16).reshape(8, -1), batch_size=3)
    distributed = servers.distribute(dataset, compression=compression)
    assert sorted(values(distributed)) == sorted(values(dataset))
    dataset_id = sg.input.service.register_dataset(servers.target, dataset, compression)
    again = sg.input.service.from_dataset_id("distributed_epoch", servers.target, dataset_id)
    assert sorted(values(again)) == sorted(values(dataset))


def test_other_compression_needs_another_id(servers) -> None:
    dataset = sg.input.Dataset(np.arange(4), batch_size=2)
    register = sg.input.service.register_dataset
    assert register(servers.target, dataset) != register(servers.target, dataset, None)
    register(servers.target, dataset, dataset_id="four")
    with pytest.raises(ValueError, match="is registered, with"):
        register(servers.target, dataset, None, "four")


def test_worker_without_the_library_says_so(servers, monkeypatch) -> None:
    pytest.importorskip("zstandard")
    dataset = servers.distribute(sg.input.Dataset(np.arange(4), batch_size=2), compression="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RuntimeError, match="compression of batches needs zstandard"):
        next(iter(dataset))


# Splits: together they are the source, and each can be read from any batch on.

_EPOCHS = (0, 2)


def _files_of_splits(num_files: int) -> sg.input.Dataset:
    return sg.input.Dataset.from_files(
        [f"file {number}" for number in range(num_files)],
        lambda files: [
            np.array([int(file.split()[1]), number]) for file in files for number in range(3)
        ],
    )


def _grain():
    grain = pytest.importorskip("grain")
    return sg.input.Dataset(grain.MapDataset.source(np.arange(7)).shuffle(seed=1).batch(2))


_DATASETS = {
    "arrays": lambda: sg.input.Dataset(np.arange(150), batch_size=2, shuffle=True),
    "many arrays": lambda: sg.input.Dataset(np.arange(700), batch_size=3),
    "short": lambda: sg.input.Dataset(np.arange(5), batch_size=2),
    "empty": lambda: sg.input.Dataset(np.arange(0), batch_size=2),
    "grain": _grain,
    "list": lambda: sg.input.Dataset([np.full(2, number) for number in range(7)]),
    "files": lambda: _files_of_splits(5),
    "generator": lambda: sg.input.Dataset.from_generator(
        lambda: (np.full(1, number) for number in range(6))
    ),
}


@pytest.mark.parametrize("name", _DATASETS)
@pytest.mark.parametrize(
    ("policy", "repeats"),
    [
        (ShardingPolicy.OFF, None),
        (ShardingPolicy.DYNAMIC, 3),
        (ShardingPolicy.DATA, (2, 2)),
        pytest.param(ShardingPolicy.OFF, 3, marks=pytest.mark.slow),
        pytest.param(ShardingPolicy.OFF, (2, 2), marks=pytest.mark.slow),
        pytest.param(ShardingPolicy.DYNAMIC, None, marks=pytest.mark.slow),
        pytest.param(ShardingPolicy.DYNAMIC, (2, 2), marks=pytest.mark.slow),
        pytest.param(ShardingPolicy.DATA, None, marks=pytest.mark.slow),
        pytest.param(ShardingPolicy.DATA, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_splits_are_the_source(name, policy, repeats) -> None:
    dataset = _DATASETS[name]()
    for count in repeats if isinstance(repeats, tuple) else [repeats] if repeats else []:
        dataset = dataset.repeat(count)
    source = dataset.as_source()
    plan = plan_splits(facts_of(source), policy, 3)
    assert plan.count is not None
    for epoch in _EPOCHS:
        expected = [batch.tolist() for batch in source.open(epoch)]
        splits = [_read(source, plan, epoch, split) for split in range(plan.count)]
        if policy is ShardingPolicy.OFF:
            assert splits == 3 * [expected]
        elif policy is ShardingPolicy.DATA:
            assert splits == [expected[index::3] for index in range(3)]
        else:
            assert _counts([*itertools.chain.from_iterable(splits)]) == _counts(expected)
            if plan.kind == "ranges":
                assert [*itertools.chain.from_iterable(splits)] == expected
        for number in (0, len(splits) - 1) if splits else ():
            for first in (1, 2, len(splits[number])):
                assert _read(source, plan, epoch, number, first) == splits[number][first:]


def _read(source, plan, epoch, split, first=0):
    batches = read_split(source, plan, epoch=epoch, split=split, first=first)
    return [batch.tolist() for batch in batches]


def _counts(batches):
    return collections.Counter(map(str, batches))


def test_infinite_sources_have_splits_without_an_end() -> None:
    source = sg.input.Dataset(np.arange(6), batch_size=2, shuffle=True).repeat().as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.DYNAMIC, None)
    assert plan.count is None
    plain = source.open(0)
    expected = [next(plain).tolist() for _ in range(9)]
    assert [batch for split in range(9) for batch in _read(source, plan, 0, split)] == expected
    files = _files_of_splits(2).repeat().as_source()
    plan = plan_splits(facts_of(files), ShardingPolicy.DYNAMIC, None)
    assert plan.count is None
    assert _read(files, plan, 0, 7) == [[1, 0], [1, 1], [1, 2]]
    assert file_of_split(files, plan, 7) == "file 1"


def test_shards_of_files_and_by_hint() -> None:
    source = _files_of_splits(5).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.FILE, 2)
    assert [row[0] for row in _read(source, plan, 0, 1)] == [1, 1, 1, 3, 3, 3]
    assert file_of_split(source, plan, 0) is None
    assert plan_splits(facts_of(source), ShardingPolicy.FILE_OR_DATA, 6).kind == "strides"
    single = plan_splits(facts_of(source), ShardingPolicy.FILE, 5)
    assert file_of_split(source, single, 4) == "file 4"
    hint = sg.input.SHARD_HINT
    hinted = sg.input.Dataset(np.arange(7), batch_size=2).shard(hint, hint).repeat(2).as_source()
    plan = plan_splits(facts_of(hinted), ShardingPolicy.HINT, 2)
    assert _read(hinted, plan, 0, 1) == [[1, 3], [5], [1, 3], [5]]
    assert file_of_split(hinted, plan, 0) is None


def test_splits_are_small_enough_to_share_and_large_enough_to_ask_seldom() -> None:
    def size(cardinality: int) -> int:
        facts = SourceFacts(cardinality, None, 1, True, True, False)
        return plan_splits(facts, ShardingPolicy.DYNAMIC, None).size

    assert [size(n) for n in (0, 1, 100, 640, 6400, 10**6)] == [1, 1, 1, 10, 64, 64]


def test_policies_that_do_not_fit_the_source() -> None:
    plain = facts_of(sg.input.Dataset(np.arange(3), batch_size=1).as_source())
    with pytest.raises(ValueError, match="FILE was set, and the dispatcher has no list"):
        plan_splits(plain, ShardingPolicy.FILE, None)
    with pytest.raises(sg.errors.InvalidArgumentError, match=r"2 workers .* no known files"):
        plan_splits(plain, ShardingPolicy.FILE, 2)
    with pytest.raises(ValueError, match="HINT was set for a dataset without"):
        plan_splits(plain, ShardingPolicy.HINT, 2)


def test_readers_are_closed() -> None:
    closed: list[int] = []

    def batches():
        try:
            yield np.arange(2)
            yield np.arange(2)
        finally:
            closed.append(1)

    source = sg.input.Dataset.from_generator(batches).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.DATA, 1)
    reading = read_split(source, plan, epoch=0, split=0)
    next(reading)
    reading.close()
    assert closed == [1]


@pytest.mark.parametrize(
    ("policy", "skipped"), [(ShardingPolicy.OFF, [4, 0, 0]), (ShardingPolicy.DATA, [5, 2, 2])]
)
def test_batches_on_the_way_to_the_next_one_are_noted(policy, skipped) -> None:
    source = sg.input.Dataset.from_generator(lambda: [np.array([n]) for n in range(12)]).as_source()
    plan = plan_splits(facts_of(source), policy, 3)
    noted: list[int] = []
    first = 4 if policy is ShardingPolicy.OFF else 1
    reading = read_split(
        source, plan, epoch=0, split=2, first=first, note_skipped=lambda: noted.append(1)
    )
    found = []
    for _ in skipped:
        next(reading)
        found.append(len(noted))
        noted.clear()
    reading.close()
    assert found == skipped

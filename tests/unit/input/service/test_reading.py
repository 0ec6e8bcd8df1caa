"""Datasets that input workers read: order, shares, positions, and bad options."""

from __future__ import annotations

import collections
import itertools
import json
import sys
import threading
import types
import uuid
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import unpack_batch
from stratagem.input.service import distribution, workers
from stratagem.input.service.address_book import service_keys
from stratagem.input.service.distribution import ServiceSource
from stratagem.input.service.splits import ShardingPolicy, SplitPlan, read_split
from stratagem.input.service.trainer import EpochReading
from tests.unit.input.service.servers import (
    InputServers,
    bucketed,
    coordinated,
    input_servers,
    values,
)
from tests.unit.launch.waiting import until


@pytest.fixture(scope="module")
def servers() -> Iterator[InputServers]:
    with input_servers(2) as servers:
        yield servers


def _files(num_files: int, batches_per_file: int = 3) -> sg.input.Dataset:
    def read(files: list[int]) -> list[np.ndarray]:
        return [
            np.array([10 * file + number]) for file in files for number in range(batches_per_file)
        ]

    return sg.input.Dataset.from_files(list(range(num_files)), read)


def _uneven_files() -> sg.input.Dataset:
    lengths = [3, 0, 5, 1, 2]
    return sg.input.Dataset.from_files(
        [*range(5)], lambda files: [np.array(10 * f + n) for f in files for n in range(lengths[f])]
    )


_KINDS = {
    "ranges": sg.input.Dataset(np.arange(170), batch_size=2, shuffle=True),
    "files": _uneven_files(),
    "one copy": sg.input.Dataset.from_generator(lambda: (np.array(n) for n in range(20))),
}


def expected_order(dataset: sg.input.Dataset, state: dict[str, Any], epoch: int) -> list[Any]:
    """The batches of a consumer from the splits alone: lanes in turn, each with its splits."""
    plan, (index, count) = SplitPlan(*state["plan"]), state["consumer"]
    assert plan.count is not None
    splits = [
        values(read_split(dataset.as_source(), plan, epoch=epoch, split=split))
        for split in range(plan.count)
    ]
    own = [split[index::count] for split in splits] if plan.count < count else splits[index::count]
    lanes = [[*itertools.chain(*own[lane :: state["num_lanes"]])] for lane in range(len(own))]
    waiting = collections.deque(lanes[: state["num_lanes"]])
    found: list[Any] = []
    while waiting:
        if lane := waiting.popleft():
            found.append(lane.pop(0))
            waiting.append(lane)
    return found


@hypothesis_settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(sorted(_KINDS)),
    consumer=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3), (5, 6)]),
    actions=st.lists(
        st.one_of(
            st.integers(1, 40),
            st.sampled_from(["save", "restore", "kill", "add", "restart the address book"]),
        ),
        max_size=12,
    ),
)
def test_any_mix_of_reads_kills_saves_and_restores_is_the_plain_list(
    kind, consumer, actions
) -> None:
    dataset, epoch = _KINDS[kind], 3
    index, count = consumer
    share = {} if count == 1 else {"consumer_index": index, "num_consumers": count}
    with input_servers(2) as servers:
        source = servers.distribute(dataset, exactly_once=True, **share).as_source()
        reader, found = source.open(epoch), []
        saved: tuple[Any, int] = (None, 0)
        for action in [1, *actions, 1000]:
            if isinstance(action, int):
                found += values(itertools.islice(reader, action))
            elif action == "save":
                saved = json.loads(json.dumps(reader.state())), len(found)
            elif action == "restore":
                reader.close()
                reader = source.open(epoch)
                reader.restore(saved[0])
                del found[saved[1] :]
            elif action == "add" and len(servers.workers) < 4:
                servers.workers.append(servers.add_worker())
            elif action == "kill":
                servers.kill_worker(0)
                if not servers.workers:
                    servers.workers.append(servers.add_worker())
            elif action == "restart the address book":
                servers.restart_dispatcher()
        assert found == expected_order(dataset, reader.state(), epoch)


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(_KINDS)),
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 24)), min_size=1, max_size=15),
)
def test_a_worker_answers_any_request_in_any_order(servers, kind, asked) -> None:
    dataset = _KINDS[kind]
    source, trainer = servers.distribute(dataset).as_source(), uuid.uuid4().hex
    assert isinstance(source, ServiceSource)
    sent, worker = source._dataset, servers.workers[0]
    plan = {"ranges": ["ranges", 43, 2], "files": ["files", 5, 0]}.get(kind, ["copies", 1, 0])
    splits = [
        values(read_split(dataset.as_source(), SplitPlan(*plan), epoch=1, split=split))
        for split in range(plan[1])
    ]
    with Connections(service_keys(worker.address), [worker.address]) as connections:
        connections.ask(0, Message("dataset", {"dataset": sent.name}, (sent.pickled,)))
        for split, index in asked:
            fields = {
                "dataset": sent.name,
                "plan": plan,
                "epoch": 1,
                "split": split % plan[1],
                "index": index,
                "from": index,
                "is_round": False,
                "keep": index,
                "behind": 0,
                "ahead": 3,
                "can_seek": kind == "ranges",
                "run": None,
                "is_new": False,
                "trainer": trainer,
                "taken": [],
                "is_compressed": False,
            }
            answer = connections.ask(0, Message("batch", fields))
            expected = splits[split % plan[1]]
            if index < len(expected):
                assert unpack_batch(answer).tolist() == expected[index]
            else:
                assert answer.kind == "end"
        unknown = connections.ask(0, Message("batch", {**fields, "dataset": "another"}))
        assert unknown.kind == "unknown"
        connections.ask(0, Message("close", {"trainer": trainer}))
    assert not worker._all_streams()


# What a worker holds: a split that was taken is forgotten, and all streams share one bound.


def _held(servers: Any) -> tuple[int, int]:
    """Bytes and streams of all workers."""
    streams = sum(len(worker._all_streams()) for worker in servers.workers)
    return sum(worker._held.num_bytes for worker in servers.workers), streams


def test_a_worker_forgets_each_split_that_was_taken() -> None:
    """An epoch may have more small files than fit in memory."""
    most = (0, 0)
    with input_servers(1) as servers:
        reader = iter(servers.distribute(_files(60, 2)))
        for _ in range(110):
            next(reader)
            most = max(most[0], _held(servers)[0]), max(most[1], _held(servers)[1])
        # Two requests ahead are for four splits at most, each with two batches of eight bytes.
        assert most[1] <= 8
        assert most[0] <= 8 * 2 * 8
        assert len(list(reader)) == 10
        until(lambda: _held(servers) == (0, 0))


# What is asked for is held in any case: two requests for each of eight lanes, of splits of two
# batches of 16 bytes; or eight batches of 8 bytes.
@pytest.mark.parametrize(("kind", "asked_bytes"), [("ranges", 2 * 8 * 2 * 16), ("one copy", 8 * 8)])
def test_streams_share_one_bound_and_what_was_dropped_is_read_again(
    kind, asked_bytes, monkeypatch
) -> None:
    monkeypatch.setattr(workers, "_MOST_BYTES", 40)
    monkeypatch.setattr(workers, "_IDLE_WITHOUT_ROOM_S", 0.0)
    dataset = _KINDS[kind]
    found: list[Any] = []
    with input_servers(1) as servers:
        options = {"job_name": "rounds" if kind == "ranges" else None, "num_consumers": 2}
        readers = [
            iter(servers.distribute(dataset, consumer_index=index, **options)) for index in range(2)
        ]
        for reader in readers:  # the second one asks when the first one has all
            for batch in reader:
                found += batch.ravel().tolist()
                assert _held(servers)[0] <= 40 + asked_bytes
    assert sorted(found) == sorted(np.concatenate([batch.ravel() for batch in dataset]))


def test_files_are_sent_without_their_contents(servers) -> None:
    """And a worker opens those of a split alone."""
    opened: list[list[int]] = []

    def read(files: list[int]) -> list[np.ndarray]:
        opened.append(files)
        return [np.full(10_000, file) for file in files]

    source = servers.distribute(sg.input.Dataset.from_files([*range(9)], read)).as_source()
    assert isinstance(source, ServiceSource)
    assert source._dataset.pickled.nbytes < 10_000
    opened.clear()
    unpickled = cloudpickle.loads(source._dataset.pickled.tobytes())
    assert values(read_split(unpickled, SplitPlan("files", 9), epoch=0, split=3)) == [10_000 * [3]]


# Order and visits by policy.


def test_off_is_plain_iteration_once_per_worker() -> None:
    dataset = sg.input.Dataset(np.arange(7), batch_size=2, shuffle=True, seed=3)
    with input_servers(1) as servers:
        distributed = servers.distribute(dataset, "parallel_epochs")
        for epoch in range(2):
            assert values(distributed) == values(dataset.as_source().open(epoch))
        servers.workers.append(servers.add_worker())
        found = values(distributed)
    assert sorted(found) == sorted(2 * values(dataset.as_source().open(2)))


def test_one_worker_has_the_order_of_the_dataset_and_more_have_the_same_each_time(servers) -> None:
    dataset = sg.input.Dataset(np.arange(500), batch_size=2)
    with input_servers(1) as alone:
        assert values(alone.distribute(dataset)) == values(dataset)
    distributed = servers.distribute(dataset)
    assert values(distributed) == values(distributed) != values(dataset)


def test_infinite_datasets_have_no_end(servers) -> None:
    dataset = sg.input.Dataset(np.arange(4), batch_size=2).repeat()
    distributed = servers.distribute(dataset)
    assert distributed.cardinality == sg.input.INFINITE_CARDINALITY
    batches = iter(distributed)
    found = values(next(batches) for _ in range(100))
    batches.close()
    assert found.count([0, 1]) == found.count([2, 3]) == 50
    files = iter(servers.distribute(_files(2).repeat()))
    assert {next(files).item() for _ in range(40)} == {0, 1, 2, 10, 11, 12}
    files.close()
    empty = sg.input.Dataset(np.arange(0), batch_size=2).repeat()
    assert values(servers.distribute(empty)) == []


def test_static_policies_divide_the_data_among_the_workers(servers) -> None:
    hint = sg.input.SHARD_HINT
    hinted = sg.input.Dataset(np.arange(20), batch_size=2).shard(hint, hint)
    for policy in (ShardingPolicy.FILE, ShardingPolicy.FILE_OR_DATA):
        found = values(servers.distribute(_files(3, 2), policy, exactly_once=True))
        assert found == [[0], [10], [1], [11], [20], [21]]
    assert values(servers.distribute(_files(1), ShardingPolicy.FILE)) == [[0], [1], [2]]
    ranges = servers.distribute(sg.input.Dataset(np.arange(9), batch_size=1), ShardingPolicy.DATA)
    assert sorted(values(ranges)) == [[number] for number in range(9)]
    found = values(servers.distribute(hinted, ShardingPolicy.HINT, exactly_once=True))
    assert sorted(itertools.chain(*found)) == list(range(20))


# Several consumers.


@pytest.mark.parametrize("kind", sorted(_KINDS))
@pytest.mark.parametrize("count", [2, 7])
def test_each_batch_goes_to_one_of_the_consumers(servers, kind, count) -> None:
    found: list[Any] = []
    for index in range(count):
        share = {"consumer_index": index, "num_consumers": count}
        found += values(servers.distribute(_KINDS[kind], exactly_once=True, **share))
    expected = values(_KINDS[kind].as_source().open(0))
    assert sorted(map(str, found)) == sorted(map(str, expected))


def test_a_job_name_stands_for_the_processes_of_a_group(servers, monkeypatch) -> None:
    dataset = sg.input.Dataset(np.arange(300), batch_size=1)
    with pytest.raises(ValueError, match="pass consumer_index and num_consumers in place of"):
        servers.distribute(dataset, job_name="shared")
    found: list[Any] = []
    for index in range(2):
        identity = types.SimpleNamespace(process_id=index, num_processes=2)
        group = types.SimpleNamespace(identity=identity)
        monkeypatch.setattr(distribution, "current_group", lambda group=group: group)
        part = values(servers.distribute(dataset, job_name="shared"))
        assert len(part) > 100
        found += part
    assert sorted(found) == [[number] for number in range(300)]


def test_coordinated_consumers_have_one_length_in_each_step(servers) -> None:
    dataset = bucketed(6, [4, 3, 2, 1, 5, 6])
    steps = coordinated(servers, dataset, "coordinated", exactly_once=True)
    assert all(first.shape[1] == second.shape[1] for first, second in steps)
    # The last group of 3, 1 and 5 batches is completed by a batch without rows.
    assert sum(len(batch) == 0 for step in steps for batch in step) == 3
    found = [batch[0, 0] for step in steps for batch in step if len(batch)]
    assert sorted(found) == sorted(batch[0, 0] for batch in dataset)
    # Consecutive batches of one split, and the same order whatever workers there are.
    assert all(len(b) == 0 or b[0, 0] == a[0, 0] + 1 for a, b in steps)
    with input_servers(1) as alone:
        again = coordinated(alone, dataset, "coordinated again")
    assert [values(step) for step in again] == [values(step) for step in steps]


def test_coordinated_consumers_resume_at_the_next_step(servers) -> None:
    dataset = bucketed(6, [4, 3, 2, 1, 5, 6])
    whole = coordinated(servers, dataset, "not interrupted")
    parts: list[list[Any]] = [[], []]
    for index in range(2):
        options = {"job_name": "interrupted", "consumer_index": index, "num_consumers": 2}
        source, state = servers.distribute(dataset, **options).as_source(), None
        for count in (5, 3, 1000):
            reader = source.open(0)
            reader.restore(state)
            parts[index] += [*itertools.islice(reader, count)]
            state = json.loads(json.dumps(reader.state()))
            reader.close()
    found = list(zip(*parts, strict=True))
    assert [values(step) for step in found] == [values(step) for step in whole]


def test_a_position_belongs_to_its_consumer(servers) -> None:
    def opened(index: int, count: int) -> Any:
        share = {"consumer_index": index, "num_consumers": count}
        return servers.distribute(_files(8), **share).as_source().open(0)

    reader = opened(0, 2)
    next(reader)
    other = opened(1, 2)
    other.restore(reader.state())
    with pytest.raises(ValueError, match="consumer 0 of 2 was restored by consumer 1 of 2"):
        next(other)


# Registered datasets, strategies, and options.


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
    with pytest.raises(ValueError, match="is registered, with"):  # with another compression
        sg.input.service.register_dataset(servers.target, dataset, None, "letters")


def test_strategies_train_on_the_batches(servers) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = servers.distribute(
        sg.input.Dataset(np.arange(11.0, dtype="float32"), batch_size=4), exactly_once=True
    )
    assert len(distributed) == 3
    for options in ({}, {"exactly_once": True, "consumer_index": 0, "num_consumers": 2}):
        dataset = servers.distribute(sg.input.Dataset(np.arange(7), batch_size=2), **options)
        assert dataset.cardinality == sg.input.UNKNOWN_CARDINALITY
    batches = iter(strategy.distribute_dataset(distributed))
    total = float(strategy.reduce("sum", next(batches), axis=0))
    state = json.loads(json.dumps(batches.get_state()))
    batches.close()
    again = iter(strategy.distribute_dataset(distributed))
    again.set_state(state)
    total += sum(float(strategy.reduce("sum", batch, axis=0)) for batch in again)
    assert total == sum(range(11))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fastest"}, "'fastest' is no sharding policy"),
        ({"consumer_index": 0}, "num_consumers=None"),
        ({"num_consumers": 2, "job_name": "a"}, "consumer_index=None"),
        ({"consumer_index": 2, "num_consumers": 2}, "0 <= consumer_index < num_consumers"),
        ({"consumer_index": 0, "num_consumers": 0}, "0 <= consumer_index < num_consumers"),
        ({"max_outstanding_requests": 0}, "max_outstanding_requests=0"),
        ({"mode": "parallel_epochs", "exactly_once": True}, "each worker reads all data"),
        ({"mode": ShardingPolicy.HINT}, "without a shard hint"),
        ({"skip_errors": -1}, "received skip_errors=-1"),
        (
            {"skip_errors": 1, "job_name": "j", "consumer_index": 0, "num_consumers": 2},
            "skip_errors=1 was passed with num_consumers=2",
        ),
    ],
)
def test_bad_options(servers, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        servers.distribute(sg.input.Dataset(np.arange(3), batch_size=1), **options)


class _Once:
    """Batches that cannot be read again."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.array([n]) for n in range(self._count))


def test_data_that_cannot_be_sent_or_repeated_are_refused(servers) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to input workers"):
        servers.distribute(sg.input.Dataset.from_generator(lambda: [lock]))
    dataset = sg.input.Dataset(_Once(2))
    assert values(servers.distribute(dataset)) == [[0], [1]]
    with pytest.raises(ValueError, match="may have other batches when it is read again"):
        servers.distribute(dataset, exactly_once=True)
    divided = servers.distribute(dataset, consumer_index=0, num_consumers=2)
    with pytest.raises(ValueError, match="2 consumers would divide the batches of one reading"):
        next(iter(divided))


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


def test_worker_without_the_library_says_so(servers, monkeypatch) -> None:
    pytest.importorskip("zstandard")
    dataset = servers.distribute(sg.input.Dataset(np.arange(4), batch_size=2), compression="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RuntimeError, match="compression of batches needs zstandard"):
        next(iter(dataset))


@pytest.mark.parametrize("is_far", [False, True])
def test_auto_compresses_between_machines(servers, monkeypatch, is_far) -> None:
    pytest.importorskip("zstandard")
    monkeypatch.setattr(Connections, "is_far", lambda self, server: is_far)
    kinds: list[bool] = []
    noted = EpochReading._note

    def note(self: Any, lane: Any, place: Any, answer: Message, batch: Any) -> None:
        kinds.append("compressed" in answer.fields)
        noted(self, lane, place, answer, batch)

    monkeypatch.setattr(EpochReading, "_note", note)
    dataset = sg.input.Dataset(np.zeros((6, 2**13)), batch_size=1)
    assert len(list(servers.distribute(dataset))) == 6
    assert any(kinds) == is_far

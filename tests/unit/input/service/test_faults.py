"""Lost, stuck and late parts of the input service, and examples that cannot be read.

Each batch comes once, or there is an error, and nothing hangs.
"""

from __future__ import annotations

import importlib
import itertools
import json
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.listener import Request
from stratagem.input.service import trainer, workers
from stratagem.input.service.address_book import DispatcherConfig
from stratagem.input.service.workers import WorkerConfig, WorkerServer
from tests.unit.input.service.servers import LIMIT_S, in_threads, input_servers, values
from tests.unit.launch.waiting import until


def _slow(number: int) -> np.ndarray:
    time.sleep(0.005)
    return np.array([number])


class _SlowBatches:
    """Batches that take 5 ms each."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, number: int) -> np.ndarray:
        return _slow(number)


def _slow_dataset() -> sg.input.Dataset:
    return sg.input.Dataset(_SlowBatches(), batch_size=1)


def _numbers(batches: Any) -> list[int]:
    return [batch.item() for batch in batches]


def test_coordinated_reads_go_on_after_the_loss_of_a_worker() -> None:
    dataset = sg.input.Dataset.from_files(
        list(range(20)), lambda files: [_slow(10 * file + n) for file in files for n in range(4)]
    )
    steps: list[list[int]] = [[], []]
    with input_servers(2) as servers:

        def consume(index: int) -> None:
            distributed = servers.distribute(
                dataset, job_name="c", consumer_index=index, num_consumers=2, exactly_once=True
            )
            for batch in distributed:
                steps[index].append(batch.item())
                if index == 0 and len(steps[0]) == 9:
                    servers.kill_worker(1)

        in_threads(consume)
    assert all(second == first + 1 for first, second in zip(*steps, strict=True))
    assert sorted([*itertools.chain.from_iterable(steps)]) == sorted(_numbers(dataset))


def test_data_that_cannot_be_read_again_are_lost_at_most_once_with_a_warning() -> None:
    class Batches:
        def __iter__(self):
            return map(_slow, range(100))

    with input_servers(1) as servers:
        batches = iter(servers.distribute(sg.input.Dataset(Batches())))
        found = [next(batches).item() for _ in range(10)]
        servers.kill_worker()
        servers.workers.append(servers.add_worker())
        with pytest.warns(RuntimeWarning, match="The rest of 1 splits was lost"):
            found += _numbers(batches)
    assert found == list(range(len(found)))
    assert len(found) < 100


@pytest.fixture
def soon_stuck(monkeypatch) -> None:
    """Trainers that take a worker for stuck after 0.3 s without progress."""
    monkeypatch.setenv("STRATAGEM_STUCK_TIMEOUT_S", "0.3")
    monkeypatch.setattr(workers, "_PATIENCE_S", 0.02)
    monkeypatch.setattr(workers, "_TICK_S", 0.02)


@pytest.mark.usefixtures("soon_stuck")
def test_a_stuck_worker_loses_its_split_to_another() -> None:
    _Stuck.gate, _Stuck.num_left = threading.Event(), 1
    with input_servers(2) as servers:
        stuck = sg.input.Dataset(_Stuck(40, held=7), batch_size=1)
        found = _numbers(servers.distribute(stuck, exactly_once=True))
        _Stuck.gate.set()  # what it reads now comes too late
        assert sorted(found) == list(range(40))
        again = servers.distribute(_slow_dataset(), exactly_once=True)
        assert sorted(_numbers(again)) == list(range(300))


class _Stuck:
    """The first readings of one batch take as long as they are held."""

    gate = threading.Event()
    num_left = 0

    def __init__(self, num_batches: int, held: int) -> None:
        self._num_batches, self._held = num_batches, held

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> np.ndarray:
        if number == self._held and _Stuck.num_left:
            _Stuck.num_left -= 1
            _Stuck.gate.wait(LIMIT_S)
        return np.array([number])


@pytest.mark.usefixtures("soon_stuck")
def test_a_worker_that_reads_again_what_arrived_is_not_stuck() -> None:
    dataset = sg.input.Dataset.from_generator(lambda: map(_slow, range(150)))
    with input_servers(1) as servers:
        batches = iter(servers.distribute(dataset, exactly_once=True))
        found = [next(batches).item() for _ in range(110)]
        servers.workers.append(servers.add_worker())
        servers.kill_worker(0)  # the other one skips 110 batches, for 550 ms
        assert sorted(found + _numbers(batches)) == list(range(150))


def test_a_poison_example_is_named_with_its_file_function_and_line() -> None:
    def read(file: str):
        yield np.array([1])
        if file == "b.txt":
            raise ValueError("The line has no label.")
        yield np.array([2])

    def broken(files: list[str]) -> sg.input.Dataset:
        return sg.input.Dataset.from_generator(
            lambda: (batch for file in files for batch in read(file))
        )

    dataset = sg.input.Dataset.from_files(["a.txt", "b.txt"], broken)
    words = (
        r"could not read batch 1 of the file b.txt in epoch 0: read \(.*test_faults.py, "
        r"line \d+\) raised ValueError: The line has no label."
    )
    with input_servers(1) as servers:
        batches = iter(servers.distribute(dataset))
        found = []
        with pytest.raises(sg.errors.PoisonExampleError, match=words):
            found.extend(batch.item() for batch in batches)
        assert found == [] or found == [1, 2, 1]


def test_a_worker_that_loses_the_dataset_loses_no_split(monkeypatch) -> None:
    """It may be started again between two requests, at the same address."""
    take, num_lost = WorkerServer._take_dataset, itertools.count(1)

    def lose_first(worker: WorkerServer, request: Request) -> None:
        take(worker, request)
        if next(num_lost) <= 3:
            with worker._lock:
                worker._sources.clear()

    monkeypatch.setattr(WorkerServer, "_take_dataset", lose_first)
    with input_servers(2) as servers:
        batches = servers.distribute(sg.input.Dataset(np.arange(20), batch_size=1))
        assert sorted(_numbers(batches)) == list(range(20))
    assert next(num_lost) > 4


def test_a_dataset_that_a_worker_cannot_load_is_an_error() -> None:
    class LoadsNowhere:
        def __reduce__(self):
            return importlib.import_module, ("only_here",)

    gone = LoadsNowhere()
    dataset = sg.input.Dataset.from_generator(lambda: [np.array([0]) if gone else None])
    with input_servers(1) as servers:
        with pytest.raises(RuntimeError, match="could not load the dataset: ModuleNotFoundError"):
            list(servers.distribute(dataset))
        assert values(servers.distribute(sg.input.Dataset(np.arange(2), batch_size=2))) == [[0, 1]]


# The dispatcher is lost, and workers that are not there.


def test_trainers_go_on_without_the_dispatcher() -> None:
    with input_servers(2) as servers:
        distributed = servers.distribute(_slow_dataset(), exactly_once=True)
        batches = iter(distributed)
        found = [next(batches).item() for _ in range(20)]
        servers.dispatcher.stop()
        assert sorted(found + _numbers(batches)) == list(range(300))
        # Another epoch has the workers of the last one, without a long wait.
        assert sorted(_numbers(distributed)) == list(range(300))
        for worker in servers.workers:
            worker._book.close()  # which would look for it


def test_a_dispatcher_that_comes_back_hears_from_its_workers() -> None:
    with input_servers(2) as servers:
        batches = iter(servers.distribute(_slow_dataset(), exactly_once=True))
        found = [next(batches).item() for _ in range(20)]
        servers.restart_dispatcher()
        until(lambda: len(servers.dispatcher.describe()["workers"]) == 2)
        servers.kill_worker(0)
        late = servers.add_worker(worker_tags=["here"])
        assert servers.dispatcher.describe()["workers"][late.address] == {"tags": ["here"]}
        found += [next(batches).item() for _ in range(20)]
        servers.workers.pop(0).stop()  # gives its splits back at once
        assert sorted(found + _numbers(batches)) == list(range(300))
        late.stop()
        assert late.address not in servers.dispatcher.describe()["workers"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that wait a second for a worker."""
    monkeypatch.setattr(trainer, "_LEAST_PATIENCE_S", 1.0)
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.5")


@pytest.mark.usefixtures("impatient")
def test_an_epoch_has_a_lane_for_each_worker_that_is_started_with_those_there() -> None:
    """And for none that has gone: `input-service` may be started again and again."""

    def started(group: tuple[str, int]) -> WorkerServer:
        worker = WorkerServer(WorkerConfig(servers.target), start=False)
        worker.group = group
        worker.start()
        return worker

    dataset = sg.input.Dataset(np.arange(3), batch_size=1)
    with input_servers(0) as servers:
        for number in range(3):
            with started((f"run {number}", 1)):
                assert len(values(servers.distribute(dataset, "parallel_epochs"))) == 3
        with started(("pair", 2)), servers.add_worker():
            found = values(servers.distribute(dataset, "parallel_epochs"))
            assert sorted(found) == sorted(3 * [[0], [1], [2]])


def test_no_dispatcher_and_no_worker_are_errors() -> None:
    with input_servers(0) as servers:
        distributed = servers.distribute(_slow_dataset(), exactly_once=True)
        words = "has had no input worker for [^\\0]*set STRATAGEM_PEER_TIMEOUT_S"
        with pytest.raises(sg.errors.UnavailableError, match=words):
            next(iter(distributed))
    with pytest.raises(sg.errors.UnavailableError, match=r"Input dispatcher 0 at .* gave no"):
        next(iter(distributed))


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_comes_in_time_is_no_error_and_the_loss_of_the_last_one_is() -> None:
    with input_servers(0) as servers:
        distributed = servers.distribute(_slow_dataset(), exactly_once=True)
        timer = threading.Timer(0.3, lambda: servers.workers.append(servers.add_worker()))
        timer.start()
        batches = iter(distributed)
        next(batches)
        timer.join()
        servers.kill_worker()
        with pytest.raises(sg.errors.UnavailableError, match="has had no input worker"):
            list(batches)


@pytest.mark.usefixtures("soon_stuck")
def test_a_batch_that_no_worker_reads_is_an_error() -> None:
    _Stuck.gate, _Stuck.num_left = threading.Event(), 1000
    with input_servers(2) as servers:
        batches = servers.distribute(sg.input.Dataset(_Stuck(1, held=0), batch_size=1))
        with pytest.raises(sg.errors.UnavailableError, match="split 0 were lost or stuck 8 times"):
            list(batches)
        _Stuck.gate.set()


def test_iterators_that_are_dropped_end_what_is_read_for_them() -> None:
    with input_servers(1) as servers:
        for _ in servers.distribute(_slow_dataset()):
            break
        until(lambda: not servers.workers[0]._all_streams())


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="protocol='grpc'"):
        DispatcherConfig(protocol="grpc")
    with pytest.raises(ValueError, match="not of the form host:port"):
        WorkerConfig("nowhere")
    with pytest.raises(RuntimeError, match="The dispatcher has not started"):
        _ = sg.input.service.DispatchServer(start=False).target


# Poison examples: skipped only if asked, each of them named, and nothing else is missed.

_POISON = {0, 7, 131, 199}


class _Texts:
    """Batches of which some cannot be read."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> np.ndarray:
        if number in _POISON:
            raise ValueError(f"Text {number} is empty.")
        return np.array(number)


def _texts() -> sg.input.Dataset:
    return sg.input.Dataset(_Texts(), batch_size=1)


@pytest.fixture(scope="module")
def servers():
    with input_servers(2) as servers:
        yield servers


def test_all_other_batches_come_and_each_skipped_one_is_named(servers) -> None:
    distributed = servers.distribute(_texts(), exactly_once=True, skip_errors=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sorted(_numbers(distributed)) == sorted(set(range(200)) - _POISON)
    told = sorted(str(one.message).splitlines()[0] for one in caught)
    line = _Texts.__getitem__.__code__.co_firstlineno + 2
    assert len(told) == 4
    for number in _POISON:
        (text,) = (one for one in told if one.endswith(f"ValueError: Text {number} is empty."))
        assert text.startswith(
            f"An input worker skipped batch {number % 3} of split {number // 3} in epoch 0: "
        )
        assert f"__getitem__ ({__file__}, line {line}) raised" in text


def test_one_more_than_asked_for_is_an_error_and_a_restored_job_counts_anew(servers) -> None:
    distributed = servers.distribute(_texts(), exactly_once=True, skip_errors=3)
    with (
        pytest.warns(RuntimeWarning, match="An input worker skipped"),
        pytest.raises(sg.errors.PoisonExampleError, match="or pass skip_errors"),
    ):
        sorted(_numbers(distributed))

    def interrupted() -> list[int]:
        reader, again = (distributed.as_source().open(0) for _ in range(2))
        found = [next(reader).item() for _ in range(120)]
        again.restore(json.loads(json.dumps(reader.state())))
        reader.close()
        return sorted([*found, *_numbers(again)])

    with pytest.warns(RuntimeWarning, match="An input worker skipped"):
        assert interrupted() == sorted(set(range(200)) - _POISON)


def test_the_rest_of_a_file_is_skipped_with_a_batch_that_cannot_be_read(servers) -> None:
    def read(files: list[str]) -> sg.input.Dataset:
        def batches() -> Iterator[np.ndarray]:
            for file in files:
                yield np.array([10 * int(file)])
                if file == "2":
                    raise ValueError("The file is truncated.")
                yield np.array([10 * int(file) + 1])

        return sg.input.Dataset.from_generator(batches)

    dataset = sg.input.Dataset.from_files(["1", "2", "3"], read)
    with pytest.warns(RuntimeWarning, match=r"skipped batch 1 of the file 2 .*file is truncated"):
        found = sorted(_numbers(servers.distribute(dataset, exactly_once=True, skip_errors=1)))
    assert found == [10, 11, 20, 30, 31]

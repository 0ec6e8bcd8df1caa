"""Lost, stuck and late parts of the input service: each batch once, or an error, and no hang."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.journal import Journal
from stratagem.input.service import consumer
from stratagem.input.service.dispatcher import DispatcherConfig
from stratagem.input.service.processes import WorkerConfig
from tests.unit.input.service.servers import input_servers, kill_worker, values
from tests.unit.launch.waiting import until

_LIMIT_S = 120


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


@pytest.mark.parametrize("seed", range(2))
def test_killed_workers_and_late_ones_change_nothing(seed) -> None:
    chance = random.Random(seed)
    with input_servers(2) as servers:
        batches = iter(servers.distribute(_slow_dataset(), exactly_once=True))
        found = []
        for number, batch in enumerate(batches):
            found.append(batch.item())
            if number in (20, 90):
                servers.kill_worker(chance.randrange(len(servers.workers)))
                servers.workers.append(servers.add_worker())
        assert sorted(found) == list(range(300))


def test_a_worker_that_stops_gives_its_splits_back_at_once() -> None:
    with input_servers(2, worker_timeout_ms=60_000) as servers:
        batches = iter(servers.distribute(_slow_dataset(), exactly_once=True))
        found = [next(batches).item() for _ in range(20)]
        servers.workers.pop(0).stop()
        assert sorted(found + _numbers(batches)) == list(range(300))


def test_several_consumers_share_a_job_while_a_worker_is_killed() -> None:
    found: list[list[int]] = [[], [], []]
    with input_servers(3) as servers:

        def consume(number: int) -> None:
            distributed = servers.distribute(_slow_dataset(), job_name="j", exactly_once=True)
            for batch in distributed:
                found[number].append(batch.item())
                if number == 0 and len(found[0]) == 10:
                    servers.kill_worker(0)

        threads = [threading.Thread(target=consume, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_S)
    assert sorted([*itertools.chain.from_iterable(found)]) == list(range(300))


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

        threads = [threading.Thread(target=consume, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_S)
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


def test_a_stuck_worker_loses_its_split_to_another() -> None:
    released = threading.Event()
    _StuckOnce.gate, _StuckOnce.num_stuck = released, 0
    with input_servers(2, stuck_timeout_ms=300) as servers:
        found = _numbers(servers.distribute(_stuck_dataset(), exactly_once=True))
        released.set()  # what it reads now comes too late
        assert sorted(found) == list(range(40))
        again = servers.distribute(_slow_dataset(), exactly_once=True)
        assert sorted(_numbers(again)) == list(range(300))


class _StuckOnce:
    """The first reading of batch 7 takes as long as it is held."""

    gate = threading.Event()
    num_stuck = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> np.ndarray:
        if number == 7 and not _StuckOnce.num_stuck:
            _StuckOnce.num_stuck += 1
            _StuckOnce.gate.wait(_LIMIT_S)
        return np.array([number])


def _stuck_dataset() -> sg.input.Dataset:
    return sg.input.Dataset(_StuckOnce(), batch_size=1)


def test_a_worker_that_reads_again_what_arrived_is_not_stuck() -> None:
    dataset = sg.input.Dataset.from_generator(lambda: map(_slow, range(150)))
    with input_servers(1, stuck_timeout_ms=300) as servers:
        batches = iter(servers.distribute(dataset, exactly_once=True))
        found = [next(batches).item() for _ in range(110)]
        servers.workers.append(servers.add_worker())
        servers.kill_worker(0)  # the other one skips 110 batches, for 550 ms
        assert sorted(found + _numbers(batches)) == list(range(150))


@pytest.mark.slow
def test_a_consumer_that_was_silent_returns_nothing_that_others_may_have() -> None:
    with input_servers(1) as servers:
        distributed = servers.distribute(_slow_dataset(), job_name="j", exactly_once=True)
        batches: Any = iter(distributed)
        next(batches)
        consumer, dispatching = batches._consumer, servers.dispatcher._dispatching
        is_thawed = threading.Event()

        def never(*args: Any, **fields: Any) -> Any:
            assert is_thawed.wait(_LIMIT_S)
            raise sg.errors.UnavailableError("this consumer was silent for too long")

        asked, consumer.client.ask = consumer.client.ask, never  # as if it were frozen

        def is_lost() -> bool:
            for name in [*dispatching._members.heard_s]:
                dispatching._members.heard_s[name] = -math.inf
            return servers.dispatcher.describe()["jobs"][0]["num_consumers"] == 0

        until(is_lost)
        consumer._heard_s = -math.inf  # so long ago
        consumer.client.ask = asked
        is_thawed.set()
        with pytest.raises(sg.errors.UnavailableError, match="silent for too long"):
            list(batches)
        assert servers.dispatcher.describe()["jobs"][0]["num_consumers"] == 0


@pytest.mark.slow
def test_a_dispatcher_that_comes_back_with_its_journal_continues(tmp_path) -> None:
    with input_servers(1, work_dir=str(tmp_path), fault_tolerant_mode=True) as servers:
        distributed = servers.distribute(
            sg.input.Dataset(_SlowBatches(), batch_size=4), exactly_once=True
        )
        batches = iter(distributed)
        found = next(batches).tolist()
        servers.restart_dispatcher()
        found += [number for batch in batches for number in batch.tolist()]
        assert sorted(found) == [[number] for number in range(300)]


@pytest.mark.slow
def test_a_dispatcher_that_comes_back_twice_notices_a_worker_that_is_killed(tmp_path) -> None:
    with input_servers(2, work_dir=str(tmp_path), fault_tolerant_mode=True) as servers:
        batches = iter(servers.distribute(_slow_dataset(), exactly_once=True))
        found = []
        for number, batch in enumerate(batches):
            found.append(batch.item())
            if number in (20, 90):
                servers.restart_dispatcher()
            if number == 91:
                servers.kill_worker(0)
        assert sorted(found) == list(range(300))


@pytest.mark.slow
def test_a_worker_that_is_lost_with_the_dispatcher_is_noticed(tmp_path) -> None:
    given = {"work_dir": str(tmp_path), "fault_tolerant_mode": True, "worker_timeout_ms": 5000}
    with input_servers(2, **given) as servers:
        batches = iter(servers.distribute(_slow_dataset(), exactly_once=True))
        found = [next(batches).item() for _ in range(20)]
        kill_worker(servers.workers.pop(0))
        servers.restart_dispatcher()
        assert sorted(found + _numbers(batches)) == list(range(300))


@pytest.mark.slow
def test_a_dispatcher_without_a_journal_has_forgotten_the_job() -> None:
    with input_servers(1) as servers:
        distributed = servers.distribute(_slow_dataset(), exactly_once=True)
        batches = iter(distributed)
        next(batches)
        servers.restart_dispatcher()
        with pytest.raises(sg.errors.UnavailableError, match="started again without its journal"):
            list(batches)
        # The dataset is registered again for the next epoch.
        assert sorted(_numbers(distributed)) == list(range(300))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that wait a second for a worker."""
    init = consumer.JobConsumer.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._silence_s = 0.5

    monkeypatch.setattr(consumer, "LEAST_PATIENCE_S", 1.0)
    monkeypatch.setattr(consumer.JobConsumer, "__init__", made)


@pytest.mark.usefixtures("impatient")
def test_no_worker_is_an_error() -> None:
    with input_servers(0) as servers:
        distributed = servers.distribute(_slow_dataset(), exactly_once=True)
        with pytest.raises(sg.errors.UnavailableError, match="has had no input worker for"):
            next(iter(distributed))


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_comes_in_time_is_no_error_and_the_loss_of_the_last_one_is() -> None:
    with input_servers(0) as servers:
        distributed = servers.distribute(_slow_dataset(), exactly_once=True)
        timer = threading.Timer(0.3, lambda: servers.workers.append(servers.add_worker()))
        timer.start()
        assert sorted(_numbers(distributed)) == list(range(300))
        servers.kill_worker()
        with pytest.raises(sg.errors.UnavailableError, match="has had no input worker for"):
            list(distributed)


def test_a_journal_that_cannot_be_written_is_an_error(tmp_path, monkeypatch) -> None:
    with input_servers(1, work_dir=str(tmp_path), fault_tolerant_mode=True) as servers:
        batches = iter(servers.distribute(_slow_dataset()))
        next(batches)

        def fail(*arguments: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(Journal, "append", fail)
        with pytest.raises(sg.errors.UnavailableError, match="journal: No space left on device"):
            list(batches)
        monkeypatch.undo()


def test_a_dispatcher_that_is_lost_for_good_is_an_error(monkeypatch) -> None:
    with input_servers(1) as servers:
        batches: Any = iter(servers.distribute(_slow_dataset()))
        next(batches)
        monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1")
        heard_s = batches._consumer._heard_s
        until(lambda: batches._consumer._heard_s > heard_s)  # what it asks now has this limit
        servers.dispatcher.stop()
        with pytest.raises(sg.errors.UnavailableError, match=r"Input dispatcher 0 at .* gave no"):
            list(batches)
        servers.workers.pop().stop()


def _broken(files: list[str]) -> list[np.ndarray]:
    def read(file: str):
        yield np.array([1])
        if file == "b.txt":
            raise ValueError("The line has no label.")
        yield np.array([2])

    return sg.input.Dataset.from_generator(
        lambda: (batch for file in files for batch in read(file))
    )


def test_a_poison_example_is_named_with_its_file_function_and_line() -> None:
    dataset = sg.input.Dataset.from_files(["a.txt", "b.txt"], _broken)
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


class _LoadsNowhere:
    def __reduce__(self):
        return _refuse, ()


def _refuse() -> None:
    raise ModuleNotFoundError("No module named 'only_here'")


def test_a_dataset_that_a_worker_cannot_load_is_an_error() -> None:
    gone = _LoadsNowhere()
    dataset = sg.input.Dataset.from_generator(lambda: [np.array([0]) if gone else None])
    with input_servers(1) as servers:
        with pytest.raises(RuntimeError, match="could not load the dataset: ModuleNotFoundError"):
            list(servers.distribute(dataset))
        assert values(servers.distribute(sg.input.Dataset(np.arange(2), batch_size=2))) == [[0, 1]]


def test_iterators_that_are_dropped_leave_their_job() -> None:
    with input_servers(1) as servers:
        for _ in servers.distribute(_slow_dataset()):
            break
        deadline_s = time.monotonic() + _LIMIT_S
        while servers.dispatcher.describe()["jobs"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_jobs_without_consumers_are_forgotten_after_a_while() -> None:
    with input_servers(1, job_gc_timeout_ms=200) as servers:
        batches = iter(servers.distribute(_slow_dataset(), job_name="j"))
        next(batches)
        batches.close()
        deadline_s = time.monotonic() + _LIMIT_S
        while servers.dispatcher.describe()["jobs"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="fault_tolerant_mode=True without work_dir"):
        DispatcherConfig(fault_tolerant_mode=True)
    with pytest.raises(ValueError, match="protocol='grpc'"):
        DispatcherConfig(protocol="grpc")
    with pytest.raises(ValueError, match="not of the form host:port"):
        WorkerConfig("nowhere")
    with pytest.raises(ValueError, match="data_transfer_address"):
        WorkerConfig("a:1", data_transfer_address="b:2")
    with pytest.raises(RuntimeError, match="The dispatcher has not started"):
        _ = sg.input.service.DispatchServer(start=False).target

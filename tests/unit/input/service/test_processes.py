"""Input workers in processes of their own: killed, added and removed while a job runs."""

from __future__ import annotations

import json
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.consumer import ConsumerPosition, ServiceClient
from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
from stratagem.input.service.job import EVERY_NUMBER, NumberRanges, ServiceJob
from stratagem.input.service.processes import InputWorkers
from tests.unit.input.service.servers import input_servers
from tests.unit.launch.remote.living import descendants, wait_for_end

_NUM_BATCHES = 300
_LIMIT_S = 60


class Batches:
    """Batches that note each reading in a file of their process, apart from the service.

    Each takes 5 ms, or 100 ms in the process `slow`.
    """

    def __init__(self, folder: Path, slow: int = 0) -> None:
        self._folder = folder
        self._slow = slow

    def __len__(self) -> int:
        return _NUM_BATCHES

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.1 if os.getpid() == self._slow else 0.005)
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write(f"{number}\n")
        return np.array([number])


def ledger(folder: Path) -> dict[str, Counter[int]]:
    """Readings of each batch, by process."""
    return {
        path.name: Counter(map(int, path.read_text().split())) for path in sorted(folder.iterdir())
    }


class Service:
    """A dispatcher in this process and workers in others; without limits on silence."""

    def __init__(self) -> None:
        self.dispatcher = DispatchServer(DispatcherConfig(worker_timeout_ms=60_000))
        self.workers = InputWorkers(self.dispatcher.target, 2, tags=["here"])

    def distribute(self, dataset: sg.input.Dataset, **options: Any) -> sg.input.Dataset:
        target = self.dispatcher.target
        return dataset.apply(sg.input.service.distribute("distributed_epoch", target, **options))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    before = descendants(os.getpid())
    made = Service()
    yield made
    made.workers.close()
    made.dispatcher.stop()
    assert not wait_for_end(descendants(os.getpid()) - before)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_splits_are_read_at_once(service, tmp_path) -> None:
    batches = service.distribute(
        sg.input.Dataset(Batches(tmp_path), batch_size=1), exactly_once=True
    )
    found, killed = [], service.workers.pids[0]
    for batch in batches:
        found.append(batch.item())
        if len(found) == 50:
            service.workers.kill(0)
    assert sorted(found) == list(range(_NUM_BATCHES))
    read = ledger(tmp_path)
    assert str(killed) in read
    # Without the report of its death, the dispatcher would have waited for a minute.
    again = sum(read.values(), Counter()) - Counter(range(_NUM_BATCHES))
    assert set(again) <= set(read[str(killed)])
    deadline_s = time.monotonic() + _LIMIT_S
    while len(workers := service.dispatcher.describe()["workers"]) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert [worker["tags"] for worker in workers.values()] == [["here"]] * 2
    assert killed not in service.workers.pids


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_slow_worker_reads_less_and_every_batch_comes_once(service, tmp_path, is_exact) -> None:
    slow, quick = service.workers.pids
    dataset = sg.input.Dataset(Batches(tmp_path, slow), batch_size=1)
    batches = service.distribute(dataset, exactly_once=is_exact)
    assert sorted(batch.item() for batch in batches) == list(range(_NUM_BATCHES))
    read = ledger(tmp_path)
    assert sum(read.values(), Counter()) == Counter(range(_NUM_BATCHES))
    assert read[str(slow)].total() < read[str(quick)].total() / 3


def test_workers_come_and_go_while_a_job_runs(service, tmp_path) -> None:
    batches = service.distribute(
        sg.input.Dataset(Batches(tmp_path), batch_size=1), exactly_once=True
    )
    found, pids = [], service.workers.pids
    for batch in batches:
        found.append(batch.item())
        if len(found) == 20:
            service.workers.add()
            added = service.workers.pids[-1]
        if len(found) == 150:
            service.workers.remove()
    assert sorted(found) == list(range(_NUM_BATCHES))
    assert service.workers.pids == pids
    assert set(ledger(tmp_path)) == {str(pid) for pid in [*pids, added]}
    assert len(service.dispatcher.describe()["workers"]) == 2


@pytest.mark.slow
def test_a_worker_that_cannot_join_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.5")
    words = r"input worker 0 cannot start: [\s\S]*UnavailableError"
    with pytest.raises(RuntimeError, match=words):
        InputWorkers("127.0.0.1:1", 1)


def test_a_worker_finishes_what_cannot_be_read_again_before_it_retires() -> None:
    class Stream:
        def __iter__(self) -> Iterator[np.ndarray]:
            for number in range(60):
                time.sleep(0.005)
                yield np.array([number])

    with input_servers(1) as servers, ServiceClient(servers.target) as client:
        batches = iter(servers.distribute(sg.input.Dataset(Stream())))
        found = [next(batches).item()]
        address = servers.workers[0].address
        assert client.ask("retire_worker", address=address).kind == "wait"
        found += [batch.item() for batch in batches]
        assert found == list(range(60))
        assert client.ask("retire_worker", address=address).kind == "noted"
        servers.workers.append(servers.add_worker())
        again = servers.distribute(sg.input.Dataset(np.arange(8), batch_size=1), exactly_once=True)
        assert sorted(batch.item() for batch in again) == list(range(8))
        assert client.ask("lose_worker", address="tcp://127.0.0.1:1").kind == "noted"


# Poison examples: skipped only if asked, each of them named, and nothing else is missed.

_POISON = {0, 7, 131, 199}
_SILENCE_MS = 60_000  # No part is lost by silence.


class _Texts:
    """Batches of which some cannot be read."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> np.ndarray:
        if number in _POISON:
            raise ValueError(f"Text {number} is empty.")
        return np.array(number)


def _dataset() -> sg.input.Dataset:
    return sg.input.Dataset(_Texts(), batch_size=1)


@pytest.fixture(scope="module")
def servers():
    with input_servers(2, worker_timeout_ms=_SILENCE_MS) as servers:
        yield servers


def _numbers(batches: sg.input.Dataset) -> list[int]:
    return sorted(batch.item() for batch in batches)


def test_all_other_batches_come_and_each_skipped_one_is_named(servers) -> None:
    distributed = servers.distribute(_dataset(), exactly_once=True, skip_errors=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _numbers(distributed) == sorted(set(range(200)) - _POISON)
    told = sorted(str(one.message).splitlines()[0] for one in caught)
    line = _Texts.__getitem__.__code__.co_firstlineno + 2
    assert len(told) == 4
    for number in _POISON:
        (text,) = (one for one in told if one.endswith(f"ValueError: Text {number} is empty."))
        assert text.startswith(
            f"An input worker skipped batch {number % 3} of split {number // 3} in epoch 0: "
        )
        assert f"__getitem__ ({__file__}, line {line}) raised" in text


def test_one_more_than_asked_for_is_an_error(servers) -> None:
    distributed = servers.distribute(_dataset(), exactly_once=True, skip_errors=3)
    with (
        pytest.warns(RuntimeWarning, match="An input worker skipped"),
        pytest.raises(sg.errors.PoisonExampleError, match="or pass skip_errors"),
    ):
        _numbers(distributed)


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
        found = _numbers(servers.distribute(dataset, exactly_once=True, skip_errors=1))
    assert found == [10, 11, 20, 30, 31]


def test_a_batch_is_skipped_once_by_all_workers_that_meet_it() -> None:
    timeout = {"worker_timeout_ms": _SILENCE_MS}
    with input_servers(1, **timeout) as servers, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The one worker holds the split of batch 7 when it is lost.
        batches = iter(
            servers.distribute(
                _dataset(),
                exactly_once=True,
                skip_errors=4,
                max_outstanding_requests=1,
            )
        )
        found = [next(batches).item() for _ in range(7)]
        killed = servers.kill_worker()
        with ServiceClient(servers.target) as client:
            client.ask("lose_worker", address=killed.address)
        servers.workers.append(servers.add_worker())
        found += [batch.item() for batch in batches]
        assert sorted(found) == sorted(set(range(200)) - _POISON)
    assert len([one for one in caught if "skipped" in str(one.message)]) == 4


def test_a_restored_job_counts_anew(servers) -> None:
    distributed = servers.distribute(_dataset(), exactly_once=True, skip_errors=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = distributed.as_source().open(0)
        found = [next(reader).item() for _ in range(120)]
        state = json.loads(json.dumps(reader.state()))
        reader.close()
        again = distributed.as_source().open(0)
        again.restore(state)
        found += [batch.item() for batch in again]
    assert sorted(found) == sorted(set(range(200)) - _POISON)
    assert len(caught) >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"skip_errors": -1},
        {"skip_errors": 1, "job_name": "j", "consumer_index": 0, "num_consumers": 2},
    ],
)
def test_the_number_is_checked(options) -> None:
    with pytest.raises(ValueError, match=r"skip_errors=-?1 was passed with num_consumers"):
        sg.input.service.distribute("distributed_epoch", "127.0.0.1:1", **options)


def test_decisions_are_records() -> None:
    job = ServiceJob(3, skip_errors=1)
    first, other = ({"split": 0, "index": index, "text": "bad"} for index in (4, 5))
    (record,), is_skipped = job.fail(first)
    assert is_skipped
    job.apply(record)
    assert job.skipped == [first]
    assert job.fail(first) == ([], True)
    assert job.fail(other) == ([{"what": "fail", "error": other}], False)
    assert ServiceJob(3, skip_errors=1).fail({"kind": "open"})[1] is False


# Positions of a consumer: small while it has whole splits, and the same after JSON.


def _state(position: ConsumerPosition) -> dict:
    return json.loads(json.dumps(position.state(num_consumers=1, num_lanes=None)))


def test_whole_splits_become_ranges_of_splits() -> None:
    position, chance = ConsumerPosition(), random.Random(0)
    lengths = [chance.randrange(5) for _ in range(200)]
    for split, length in enumerate(lengths):
        events = [(split, index) for index in range(length)] + [(split, None)]
        chance.shuffle(events)  # the length may be known before the last batch is returned
        for _, index in events:
            if index is None:
                position.note_length(split, length)
            else:
                position.add(split, index)
    position.add(200, 1)
    state = _state(position)
    assert state["done"] == [[0, 200]]
    assert state["parts"] == {"200": [[1, 2]]}
    assert _state(ConsumerPosition(state)) == state
    assert position.numbers_of(3) == NumberRanges([EVERY_NUMBER])
    assert position.numbers_of(200).as_json() == [[1, 2]]
    assert position.numbers_of(201).as_json() == []


def test_splits_that_others_share_keep_their_parts() -> None:
    position = ConsumerPosition()
    for index in (0, 2):
        position.add(0, index)
    position.note_length(0, 4)
    assert _state(position)["parts"] == {"0": [[0, 1], [2, 3]]}
    position.pass_split(0)
    assert _state(position)["passed"] == [[0, 1]]
    assert _state(position)["parts"] == {}
    assert position.numbers_of(0).as_json() == [[0, 1], [2, 3]]


def test_only_the_last_passed_splits_are_remembered_with_their_batches() -> None:
    position = ConsumerPosition()
    for split in range(1000):
        position.add(split, 0)
        position.pass_split(split)
    assert position.numbers_of(0).as_json() == []
    assert position.numbers_of(999).as_json() == [[0, 1]]
    assert _state(position)["passed"] == [[0, 1000]]

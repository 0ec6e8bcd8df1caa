"""Input workers in processes of their own: killed, added and removed while a job runs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.consumer import ServiceClient
from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
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

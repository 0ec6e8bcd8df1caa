"""Input workers in processes of their own, on this machine and on Ray, which are killed."""

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
from stratagem.input.service.address_book import DispatcherConfig, DispatchServer
from stratagem.input.service.workers import InputWorkers
from tests.unit.launch.remote.living import descendants, wait_for_end
from tests.unit.launch.waiting import until

_NUM_BATCHES = 300


class Batches:
    """Batches that note each reading in a file of their process, apart from the service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return _NUM_BATCHES

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.005)
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
        self.workers = InputWorkers(self.dispatcher.target, 2)

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
    found, killed = [], service.workers.processes.pids[0]
    for batch in batches:
        found.append(batch.item())
        if len(found) == 50:
            service.workers.processes.kill(0)
    assert sorted(found) == list(range(_NUM_BATCHES))
    read = ledger(tmp_path)
    assert str(killed) in read
    # What others read again was read ahead there, or asked for when it died.
    again = sum(read.values(), Counter()) - Counter(range(_NUM_BATCHES))
    assert again.total() < 50
    until(lambda: len(service.dispatcher.describe()["workers"]) == 2)
    assert killed not in service.workers.processes.pids


@pytest.mark.slow
def test_a_worker_that_cannot_join_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.5")
    words = r"input worker 0 cannot start: [\s\S]*UnavailableError"
    with pytest.raises(RuntimeError, match=words):
        InputWorkers("127.0.0.1:1", 1)


# A service that `start` makes, on this machine and on Ray.


def _numbers(service: sg.input.service.InputService) -> list[int]:
    distribute = sg.input.service.distribute("distributed_epoch", service.target, exactly_once=True)
    dataset = sg.input.Dataset(np.arange(90), batch_size=1).apply(distribute)
    return sorted(batch.item() for batch in dataset)


def test_workers_are_started_and_ended(monkeypatch) -> None:
    with sg.input.service.start(1) as service:
        assert service.num_workers == 1
        assert _numbers(service) == list(range(90))
    service.close()
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1")
    with pytest.raises(sg.errors.UnavailableError, match="Input dispatcher"):
        sg.input.service.register_dataset(service.target, sg.input.Dataset([np.arange(2)]))
    with pytest.raises(ValueError, match="start received num_workers=0"):
        sg.input.service.start(0)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_places_the_workers_and_starts_a_killed_one_again() -> None:
    with sg.input.service.start(2) as service:
        pids = service._workers.processes.pids
        assert _numbers(service) == list(range(90))
        service._workers.processes.kill(0)
        assert _numbers(service) == list(range(90))
        until(lambda: service._workers.processes.pids[0] != pids[0])
        assert _numbers(service) == list(range(90))

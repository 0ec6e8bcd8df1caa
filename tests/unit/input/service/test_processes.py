"""A dispatcher and input workers in processes, here and on Ray, which are killed and stopped."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.cluster.addresses import free_ports
from stratagem.input.service.address_book import BookClient, DispatcherConfig, DispatchServer
from stratagem.input.service.workers import InputWorkers, WorkerConfig, WorkerServer
from tests.unit.launch.remote.living import descendants, wait_for_end
from tests.unit.launch.waiting import until

_NUM_BATCHES = 300


class Batches:
    """Numbers that take a while, and may be noted in a file of their process."""

    def __init__(self, folder: Path | None = None, num_batches: int = _NUM_BATCHES) -> None:
        self._folder, self._num_batches = folder, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.002 if self._folder is None else 0.005)
        if self._folder is not None:
            with (self._folder / str(os.getpid())).open("a") as file:
                file.write(f"{number}\n")
        return np.array([number])


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_splits_are_read_at_once(tmp_path) -> None:
    before = descendants(os.getpid())
    config = DispatcherConfig(worker_timeout_ms=60_000)
    with sg.input.service.InputService(config, 2) as service:
        distribute = sg.input.service.distribute(
            "distributed_epoch", service.target, exactly_once=True
        )
        processes = service._workers.processes
        found, killed = [], processes.pids[0]
        for batch in sg.input.Dataset(Batches(tmp_path), batch_size=1).apply(distribute):
            found.append(batch.item())
            if len(found) == 50:
                processes.kill(0)
        assert sorted(found) == list(range(_NUM_BATCHES))
        assert (tmp_path / str(killed)).exists()
        # What others read again was read ahead there, or asked for when it died.
        read = Counter(number for one in tmp_path.iterdir() for number in one.read_text().split())
        assert read.total() - len(read) < 50
        until(lambda: len(service._dispatcher.describe()["workers"]) == 2)
        assert killed not in processes.pids
    assert not wait_for_end(descendants(os.getpid()) - before)


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


# A dispatcher and workers in processes, each killed at random: every batch comes exactly once.


def _dispatcher(port: int) -> None:
    DispatchServer(DispatcherConfig(port=port, worker_timeout_ms=1000)).join()


def _worker(target: str, port: int) -> None:
    WorkerServer(WorkerConfig(target, worker_address=f"127.0.0.1:{port}", port=port)).join()


class ServiceProcesses:
    """A dispatcher and two workers; each can be killed, and started again."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._ports = free_ports(3)
        self.target = f"127.0.0.1:{self._ports[0]}"
        self._all: list[Any] = []
        self.workers: list[Any] = [None, None]
        self.start_dispatcher()
        for place in range(2):
            self.start_worker(place)
        with BookClient(self.target) as book:
            until(lambda: len(book.ask("readers").fields["readers"]) == 2)

    def start(self, run: Callable[..., None], *arguments: Any) -> Any:
        process = self._context.Process(target=run, args=arguments, daemon=True)
        process.start()
        self._all.append(process)
        return process

    def start_dispatcher(self) -> None:
        self.dispatcher = self.start(_dispatcher, self._ports[0])

    def start_worker(self, place: int) -> None:
        self.workers[place] = self.start(_worker, self.target, self._ports[1 + place])

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.join()


_NUM_EXAMPLES = 320


def _train(target: str, share: dict[str, int], folder: Path) -> None:
    """Notes each batch and its position in one line, which is there as a whole or not at all."""
    distribute = sg.input.service.distribute(
        "distributed_epoch", target, exactly_once=True, **share
    )
    dataset = sg.input.Dataset(Batches(num_batches=_NUM_EXAMPLES), batch_size=2).apply(distribute)
    batches = dataset.as_source().open(0)
    ledger = folder / str(share["consumer_index"])
    if taken := _taken(ledger):
        batches.restore(taken[-1]["state"])
    with ledger.open("a") as file:
        for batch in batches:
            line = {"examples": batch.ravel().tolist(), "state": batches.state()}
            file.write(json.dumps(line) + "\n")
            file.flush()
    (folder / f"{share['consumer_index']} is done").touch()


def _taken(ledger: Path) -> list[dict[str, Any]]:
    """The whole lines of a trainer; a killed one may have left a part of another."""
    lines = ledger.read_bytes().split(b"\n")[:-1] if ledger.exists() else []
    if lines:
        ledger.write_bytes(b"".join(line + b"\n" for line in lines))
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["dispatcher", "worker", "trainer"])
@pytest.mark.parametrize("num_consumers", [1, 2])
def test_every_example_comes_once_while_a_part_is_killed(num_consumers, part, tmp_path) -> None:
    chance = random.Random(f"{part} {num_consumers}")
    ledgers = [tmp_path / str(index) for index in range(num_consumers)]

    def num_taken() -> int:
        return sum(path.read_bytes().count(b"\n") for path in ledgers if path.exists())

    with contextlib.closing(ServiceProcesses()) as processes:

        def train(index: int) -> Any:
            share = {"consumer_index": index, "num_consumers": num_consumers}
            return processes.start(_train, processes.target, share, tmp_path)

        trainers = [train(index) for index in range(num_consumers)]
        for count in (20, 60, 100, 130):
            until(lambda count=count: num_taken() >= count)
            place = chance.randrange(2)
            if part == "trainer":
                place %= num_consumers
                _end(trainers[place])
                trainers[place] = train(place)
            elif part == "worker":
                _end(processes.workers[place])
                processes.start_worker(place)
            else:
                _end(processes.dispatcher)
                processes.start_dispatcher()
        for trainer in trainers:
            trainer.join()
    examples = [one for path in ledgers for line in _taken(path) for one in line["examples"]]
    assert sorted(examples) == list(range(_NUM_EXAMPLES))
    assert all((tmp_path / f"{index} is done").exists() for index in range(num_consumers))


def _end(process: Any) -> None:
    process.kill()
    process.join()


@pytest.mark.slow
def test_a_stopped_worker_loses_its_splits(monkeypatch, tmp_path) -> None:
    """It is alive, and its connection is open."""
    monkeypatch.setenv("STRATAGEM_STUCK_TIMEOUT_S", "0.8")
    with contextlib.closing(ServiceProcesses()) as processes:
        distribute = sg.input.service.distribute(
            "distributed_epoch", processes.target, exactly_once=True
        )
        found = []
        for batch in sg.input.Dataset(Batches(tmp_path), batch_size=1).apply(distribute):
            found.append(batch.item())
            if len(found) == 60:
                os.kill(processes.workers[0].pid, signal.SIGSTOP)
    assert sorted(found) == list(range(_NUM_BATCHES))

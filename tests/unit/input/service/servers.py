"""A dispatcher and workers in threads of this process, and their ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import stratagem as sg
from stratagem.input.service.address_book import DispatcherConfig, DispatchServer
from stratagem.input.service.workers import WorkerConfig, WorkerServer

# Nothing is lost because the machine is busy: a test says what has been silent for so long.
SILENCE_MS = 120_000
LIMIT_S = 120


class InputServers:
    """A dispatcher and workers."""

    def __init__(self, num_workers: int, **config: Any) -> None:
        self.config = {"worker_timeout_ms": SILENCE_MS, **config}
        self.dispatcher = DispatchServer(DispatcherConfig(**self.config))
        self.target = self.dispatcher.target
        self.config["port"] = int(self.target.rpartition(":")[2])
        self.workers = [self.add_worker() for _ in range(num_workers)]

    def add_worker(self, **config: Any) -> WorkerServer:
        return WorkerServer(WorkerConfig(self.target, **config))

    def distribute(
        self, dataset: sg.input.Dataset, mode: Any = "distributed_epoch", **options: Any
    ):
        return dataset.apply(sg.input.service.distribute(mode, self.target, **options))

    def kill_worker(self, index: int = -1) -> WorkerServer:
        """Ends a worker without a word, as SIGKILL would, and lets the silence pass."""
        worker = self.workers.pop(index)
        worker._has_ended.set()
        worker._listener.close(limit_s=0)
        with worker._lock:
            worker._close({*worker._all_streams()})
        worker._book.ask("leave", address=worker.address)
        worker._book.close()
        return worker

    def restart_dispatcher(self) -> None:
        self.dispatcher.stop()
        self.dispatcher = DispatchServer(DispatcherConfig(**self.config))

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.dispatcher.stop()


@contextlib.contextmanager
def input_servers(num_workers: int = 2, **config: Any) -> Iterator[InputServers]:
    servers = InputServers(num_workers, **config)
    try:
        yield servers
    finally:
        servers.stop()


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def bucketed(num_buckets: int, sizes: list[int]) -> sg.input.Dataset:
    """Batches of one length in a row: `sizes` of them, then the next length."""
    return sg.input.Dataset.from_files(
        list(range(num_buckets)),
        lambda files: [
            np.full((1, file + 1), 100 * file + n) for file in files for n in range(sizes[file])
        ],
    )


def in_threads(consume: Callable[[int], None], count: int = 2) -> None:
    """Calls a function with each index, in a thread of its own."""
    threads = [threading.Thread(target=consume, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)


def coordinated(servers: Any, dataset: sg.input.Dataset, name: str, **options: Any):
    """The batches of two consumers, step by step."""
    steps: list[list[Any]] = [[], []]

    def consume(index: int) -> None:
        distributed = servers.distribute(
            dataset, job_name=name, consumer_index=index, num_consumers=2, **options
        )
        steps[index] = list(distributed)

    in_threads(consume)
    return list(zip(*steps, strict=True))

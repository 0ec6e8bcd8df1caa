"""Clusters whose servers and workers are threads of the test."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.cluster_plan import CoordinatorOptions, RemoteStateStrategy
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.shards import ASYNCHRONOUS
from stratagem.parameter_server.strategy import coordinator_parts, make_worker
from tests.unit.parameter_server.server.test_server import Server


class ThreadWorkers:
    """Workers in this process, each with devices of its own."""

    def __init__(self, keys: ClusterKeys, devices: Sequence[Sequence[str]]) -> None:
        self.workers = [make_worker(keys, devices=own) for own in devices]

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    def watch(self, on_lost: Any, on_returned: Any, on_given_up: Any) -> None:
        self.on_lost, self.on_returned, self.on_given_up = on_lost, on_returned, on_given_up

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class ThreadCluster:
    """Servers in this process, and workers where they are asked for."""

    def __init__(self, num_servers: int, devices: Sequence[Sequence[str]]) -> None:
        self.keys = ClusterKeys.make()
        self.servers = [ParameterServer(self.keys) for _ in range(num_servers)]
        self._devices = devices
        self.workers: ThreadWorkers | None = None

    @property
    def server_addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def locate_server(self, server: int) -> str | None:
        return self.servers[server].address

    def report_moves_to(self, *_: Any) -> None:
        pass

    def start_workers(self) -> ThreadWorkers:
        self.workers = ThreadWorkers(self.keys, self._devices)
        return self.workers

    def close(self) -> None:
        for server in self.servers:
            server.close()


class OneThatDies:
    """A cluster of one server, which keeps a journal and can be killed."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder)
        self.keys = self.server.keys
        self.server_addresses = [self.server.running.address]

    def report_moves_to(self, *_: Any) -> None:
        pass

    def locate_server(self, server: int) -> str:
        return self.server_addresses[server]

    def close(self) -> None:
        self.server.running.close()


class Asked:
    """Counts rows and whole values that servers are asked for or sent, and bytes that travel."""

    def __init__(self, servers: Sequence[ParameterServer]) -> None:
        self.rows, self.whole, self.sent = (Counter[str]() for _ in range(3))
        self.num_bytes = 0
        for server in servers:
            self._watch(server.store)

    def _watch(self, store: Any) -> None:
        pull_rows, read, update = store.pull_rows, store.read, store.update

        def noted_rows(name: str, rows: Any, **options: Any) -> Any:
            found = pull_rows(name, rows, **options)
            self.rows[name] += len(rows)
            self.num_bytes += found.nbytes
            return found

        def noted_whole(names: Any) -> Any:
            version, values = read(names)
            self.whole.update(names)
            self.num_bytes += sum(value.nbytes for value in values)
            return version, values

        def noted_update(whole: Any, rows: Any, optimizers: Any) -> int:
            self.sent.update(whole)
            arrays = [*whole.values(), *(one for pair in rows.values() for one in pair)]
            self.num_bytes += sum(array.nbytes for array in arrays)
            return update(whole, rows, optimizers)

        store.pull_rows, store.read, store.update = noted_rows, noted_whole, noted_update


@contextlib.contextmanager
def local_strategy(
    num_workers: int = 1, num_servers: int = 2, devices_per_worker: int = 1, **options: Any
) -> Iterator[RemoteStateStrategy]:
    """A strategy on a cluster of threads, which ends with the block."""
    devices = [
        [f"cpu:{worker * devices_per_worker + own}" for own in range(devices_per_worker)]
        for worker in range(num_workers)
    ]
    partitioner = options.pop("variable_partitioner", None)
    mode = options.pop("mode", ASYNCHRONOUS)
    limits = options.pop("options", None) or CoordinatorOptions()
    assert not options
    cluster: Any = ThreadCluster(num_servers, devices)
    parts = coordinator_parts(cluster, partitioner, mode, limits.recovery_timeout_s)
    with contextlib.closing(RemoteStateStrategy(parts, limits)) as strategy:
        yield strategy


@contextlib.contextmanager
def coordinated(num_workers: int = 1, **options: Any) -> Iterator[ClusterCoordinator]:
    """The coordinator of such a strategy."""
    with local_strategy(num_workers, **options) as strategy:
        yield ClusterCoordinator(strategy)

"""Workers and consumers of a dispatcher: where they are, and when they were last heard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from stratagem.cluster.addresses import without_scheme
from stratagem.messages import explain

_ANY_PORT = "%port%"


@dataclasses.dataclass
class InputWorker:
    """A live worker. `revoked` are splits that were taken from it: run, split, attempt."""

    name: str
    address: str
    index: int | None  # in the list of the configuration
    tags: list[str]
    heard_s: float
    revoked: list[list[object]] = dataclasses.field(default_factory=list[list[object]])
    is_retiring: bool = False  # It gets no more splits.
    num_read: int = 0
    read_s: float = 0.0


class Members:
    """Live workers, and the last signs of life of consumers.

    `addresses` are the workers of static sharding, None without. Times are arguments.
    """

    def __init__(self, addresses: Sequence[str] | None) -> None:
        self._addresses = None if addresses is None else [without_scheme(one) for one in addresses]
        self.workers: dict[str, InputWorker] = {}
        self.lost: set[str] = set()  # they must begin anew under another name
        self.heard_s: dict[tuple[str, str], float] = {}  # by run and consumer
        self.loads: dict[tuple[str, str], dict[str, float]] = {}  # the same

    @property
    def num_listed(self) -> int | None:
        """Number of workers in the list of the configuration, None without."""
        return None if self._addresses is None else len(self._addresses)

    def hear_worker(self, name: str, address: str, tags: list[str], now_s: float) -> list[str]:
        """Notes a sign of life, and returns the names of former workers at this address.

        Raises ValueError for a worker that the configuration does not list.
        """
        if name in self.workers:
            self.workers[name].heard_s = now_s
            return []
        former = [worker.name for worker in self.workers.values() if worker.address == address]
        taken = {worker.index for worker in self.workers.values() if worker.name not in former}
        index = self._index_of(address, taken)
        self.workers[name] = InputWorker(name, address, index, tags, now_s)
        return former

    def _index_of(self, address: str, taken: Iterable[int | None]) -> int | None:
        if self._addresses is None:
            return None
        address = without_scheme(address)
        host = address.rpartition(":")[0]
        for index, listed in enumerate(self._addresses):
            is_any = listed in (host, f"{host}:{_ANY_PORT}")
            if index not in taken and (listed == address or is_any):
                return index
        raise ValueError(
            explain(
                f"A worker at {address} asked to join.",
                expected=f"one of DispatcherConfig.worker_addresses, {self._addresses}, each once.",
                fix="add its address, or correct WorkerConfig.worker_address.",
            )
        )

    def silent_workers(self, before_s: float) -> list[str]:
        """Returns the workers that were last heard before a time."""
        return [worker.name for worker in self.workers.values() if worker.heard_s < before_s]

    def workers_at(self, address: str) -> list[str]:
        """Returns the names of the live workers at an address, with or without `tcp://`."""
        wanted = without_scheme(address)
        return [
            worker.name
            for worker in self.workers.values()
            if without_scheme(worker.address) == wanted
        ]

    def remove_worker(self, name: str) -> None:
        """Forgets a worker."""
        self.lost.add(name)
        self.workers.pop(name, None)

    def reserved_for_others(self, name: str, *, may_wait: bool) -> set[int]:
        """Returns the splits of static sharding that belong to other workers.

        These are live, or may still come if `may_wait`.
        """
        if self._addresses is None:
            return set()
        own = self.workers[name].index
        live = {worker.index for worker in self.workers.values()}
        return {
            index
            for index in range(len(self._addresses))
            if index != own and (may_wait or index in live)
        }

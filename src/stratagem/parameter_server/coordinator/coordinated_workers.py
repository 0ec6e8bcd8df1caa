"""Workers of a coordinator: their links, and losses and returns among them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections import Counter

from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.parameter_server.coordinator.closure_queue import MAX_CLOSURES, ClosureQueue
from stratagem.parameter_server.coordinator.stalls import StallWatch
from stratagem.parameter_server.coordinator.transient_failures import TransientFailures
from stratagem.parameter_server.coordinator.worker_link import WorkerLink
from stratagem.parameter_server.server.versions import by_kind


class CoordinatedWorkers(Closing):
    """Starts the workers of a strategy, and keeps them busy with functions from a queue.

    `processes` are those of the workers. `stalls` checks for stalled synchronous updates; None if
    updates are asynchronous.
    """

    def __init__(self, strategy: RemoteStateStrategy, queue: ClosureQueue) -> None:
        self._strategy = strategy
        self._queue = queue
        self._ended: set[int] = set()
        self._num_needed = strategy.placement.remote.variables.mode.num_needed
        self._expecting = threading.Lock()
        self.processes = strategy.cluster.start_workers()
        addresses = self.processes.addresses
        # In a synchronous update workers wait for each other: none may hold functions back.
        is_synchronous = self._num_needed > 0
        self._queue.num_workers = MAX_CLOSURES if is_synchronous else len(addresses)
        self._connections = Connections(
            strategy.cluster.keys,
            addresses,
            peers="Worker",
            silence_s=strategy.limits.recovery_timeout_s,
        )
        self._name = uuid.uuid4().hex
        failures = TransientFailures(strategy.limits.max_transient_failures)
        self._links = [
            WorkerLink(
                index,
                strategy,
                self._connections,
                self._queue,
                self._introduction,
                failures,
                is_grouping=not is_synchronous,
            )
            for index in range(len(addresses))
        ]
        strategy.cluster.report_moves_to(self._note_move)
        self.processes.watch(self._note_loss, self._note_return, self._note_end)
        for link in self._links:
            link.start()
        self.stalls: StallWatch | None = None
        if is_synchronous:
            self.stalls = StallWatch(strategy.placement.remote.variables.client, self._at_work)

    @property
    def count(self) -> int:
        """Number of workers, including lost ones."""
        return len(self._links)

    @property
    def present(self) -> list[int]:
        """Indices of all workers that are not permanently lost."""
        return [index for index in range(len(self._links)) if index not in self._ended]

    @property
    def lost_updates(self) -> Counter[str]:
        """Updates lost in server restarts, by kind: the most that any process saw of each run."""
        losses = Counter(self._strategy.placement.remote.variables.client.losses)
        for link in self._links:
            losses |= link.losses
        return by_kind(losses)

    @property
    def row_counts(self) -> Counter[str]:
        """Numbers of "hits" and "misses" of all workers' row caches."""
        return sum((link.row_counts for link in self._links), Counter())

    def close(self) -> None:
        """Stops the workers; close the queue first."""
        if self.stalls is not None:
            self.stalls.close()
        for link in self._links:
            link.close()
        self.processes.close()
        self._connections.close()

    def _at_work(self) -> tuple[set[int], set[int], int]:
        running = {index for index, link in enumerate(self._links) if link.is_running}
        idle = {*range(len(self._links))} - running - self._ended
        return running, idle, self._queue.num_queued_for(idle)

    def _introduction(self) -> Message:
        """Returns the message that makes a worker join the cluster."""
        cluster, variables = self._strategy.cluster, self._strategy.placement.remote.variables
        row_cache = self._strategy.row_cache
        fields = {
            "coordinator": self._name,
            "servers": [
                cluster.locate_server(server) or address
                for server, address in enumerate(cluster.server_addresses)
            ],
            "mode": dataclasses.asdict(variables.mode),
            "recovery_timeout_s": self._strategy.limits.recovery_timeout_s,
            "row_cache": row_cache and dataclasses.asdict(row_cache),
        }
        return Message("join", fields)

    def _note_move(self, server: int, address: str) -> None:
        """Sends a restarted server's new address to the workers, which may wait at the old one."""
        for link in self._links:
            threading.Thread(target=link.send_address, args=(server, address), daemon=True).start()
        if self._ended:  # the restarted server may have an old count of workers
            self._expect_present()

    def _note_loss(self, worker: int, reason: str) -> None:
        self._links[worker].lose(reason)

    def _note_return(self, worker: int, address: str) -> None:
        if worker in self._ended:
            self._ended.discard(worker)
            self._queue.find_worker(worker)
            self._expect_present()
        self._links[worker].find(address)

    def _note_end(self, worker: int, error: Exception) -> None:
        """Handles a worker that will not be restarted: training continues on the others, if any."""
        self._queue.lose_worker(worker, error)
        self._ended.add(worker)
        if len(self._ended) == len(self._links):
            self._queue.lose_worker(None, error)
        self._expect_present()

    def _expect_present(self) -> None:
        """Makes synchronous updates wait only for available workers. Does not block."""
        if self._num_needed:
            threading.Thread(target=self._send_expected, daemon=True).start()

    def _send_expected(self) -> None:
        variables = self._strategy.placement.remote.variables
        with self._expecting:
            # Backup workers absorb losses first; only then do updates need fewer gradients.
            num_needed = max(1, min(self._num_needed, len(self.present)))
            variables.mode = dataclasses.replace(variables.mode, num_needed=num_needed)
            # Servers without an optimizer get this mode with it; lost ones after their restart.
            with contextlib.suppress(UnavailableError, ServerError):
                variables.client.expect(num_needed)

"""Input workers as processes on this machine or as Ray actors, restarted when they die."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from stratagem import environment, logs
from stratagem.closing import Closing
from stratagem.cluster.addresses import is_loopback, split_address
from stratagem.errors import UnavailableError
from stratagem.group.authentication.secret import find_secret
from stratagem.group.transport.connection import ServerError
from stratagem.input.service.service_client import ServiceClient
from stratagem.input.service.worker import WorkerConfig, WorkerServer
from stratagem.launch.processes.local_processes import LocalProcesses, SharedStandby
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.launch.remote.ray.ray_cluster import own_host

_logger = logging.getLogger(__name__)
_KIND = "input worker"
# Accelerators and the tasks of a cluster belong to trainers.
_VARIABLES = {"JAX_PLATFORMS": "cpu", "TF_CONFIG": "", "STRATAGEM_SLURM_JOBS": ""}
_MODULES = ("cloudpickle", "zmq", "stratagem.input.service.processes")
_POLL_S = 0.2


def serve_input_worker(
    index: int, dispatcher: str, host: str | None, tags: Sequence[str]
) -> WorkerServer:
    """Returns a worker in its process; without a host, on loopback if its dispatcher is."""
    if host is None and not is_loopback(split_address(dispatcher)[0]):
        host = own_host()
    return WorkerServer(WorkerConfig(dispatcher, worker_address=host, worker_tags=[*tags]))


class InputWorkers(Closing):
    """Processes of input workers, which come and go one by one.

    Args:
        dispatcher: address of their dispatcher.
        count: number of workers at first.
        on_ray: places them by Ray, which this process is connected to; else they are forked here.
        host: address of this machine for consumers; None for loopback, or that of Ray.
        tags: names that `DispatchServer.describe` shows.

    Raises:
        RuntimeError: a worker cannot start.
        UnavailableError: a worker has died at its start.
    """

    def __init__(
        self,
        dispatcher: str,
        count: int,
        *,
        on_ray: bool = False,
        host: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._arguments = (dispatcher, host, tuple(tags))
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._num_added = 0
        # A group for each, oldest first, so that one can end without the others.
        self._workers: list[LocalProcesses | RayProcesses] = []
        self._is_on_ray = on_ray
        self._standby: SharedStandby | None = None  # from the first worker on
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_standby)
            self._client = stack.enter_context(ServiceClient(dispatcher))
            stack.callback(self._close_workers)
            for worker in [self._begin() for _ in range(count)]:
                self._follow(worker)
            self._closing = stack.pop_all()

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [pid for worker in self._workers for pid in worker.pids]

    def kill(self, index: int) -> None:
        """Kills a worker, for tests."""
        self._workers[index].kill(0)

    def add(self) -> None:
        """Adds a worker, and waits until it has started; raises what `InputWorkers` raises."""
        with self._lock:
            if not self._is_closed.is_set():
                self._follow(self._begin())

    def remove(self) -> None:
        """Removes the worker that came last; others read the rest of its splits.

        A split that cannot be read again is finished first.
        """
        with self._lock:
            (address,) = self._workers[-1].addresses
            while not self._is_closed.is_set():
                if self._ask("retire_worker", address):
                    break
                self._is_closed.wait(_POLL_S)
            else:
                return
            self._workers.pop().close()

    def close(self) -> None:
        """Ends all workers."""
        self._is_closed.set()
        with self._lock:
            self._closing.close()

    def _begin(self) -> LocalProcesses | RayProcesses:
        arguments, number = [self._arguments], self._num_added
        self._num_added += 1
        worker: LocalProcesses | RayProcesses
        if self._is_on_ray:
            secret = find_secret()
            variables = {**_VARIABLES, **(secret.variables() if secret is not None else {})}
            worker = RayProcesses(
                _KIND,
                serve_input_worker,
                arguments,
                environment=variables,
                modules=_MODULES,
                first=number,
            )
        else:
            if self._standby is None:
                variables = {**environment.snapshot(), **_VARIABLES}
                self._standby = SharedStandby(_MODULES, variables)
            worker = LocalProcesses(
                _KIND, serve_input_worker, arguments, standby=self._standby, first=number
            )
        self._workers.append(worker)
        return worker

    def _follow(self, worker: LocalProcesses | RayProcesses) -> None:
        """Restarts a worker that dies; its splits are free at once."""
        try:
            (address,) = worker.addresses
        except BaseException:
            self._workers.remove(worker)
            worker.close()
            raise
        found = [address]

        def lose(index: int, reason: str) -> None:
            self._ask("lose_worker", found[0])

        def find(index: int, address: str) -> None:
            found[0] = address

        worker.watch(lose, find, _give_up)

    def _ask(self, kind: str, address: str) -> bool:
        """Asks the dispatcher; returns False if it is away, or wants to be asked again."""
        try:
            return self._client.ask(kind, limit_s=2.0, address=address).kind == "noted"
        except (UnavailableError, ServerError):
            return False

    def _close_standby(self) -> None:
        if self._standby is not None:
            self._standby.close()

    def _close_workers(self) -> None:
        closing = [threading.Thread(target=worker.close) for worker in self._workers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def _give_up(index: int, error: Exception) -> None:
    logs.announce(_logger, str(error))

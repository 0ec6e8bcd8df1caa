"""Input workers as processes on this machine or as Ray actors, restarted when they die."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from stratagem import environment, logs, settings
from stratagem.cluster.addresses import is_loopback, join_address, split_address, without_scheme
from stratagem.environment import load
from stratagem.errors import UnavailableError, explain
from stratagem.group.authentication.secret import find_secret
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.input.service.consumer import ServiceClient, describe_open_error
from stratagem.input.service.dispatcher import bind_host, check_protocol, service_keys, tcp_address
from stratagem.input.service.job_requests import ReadCounts, WindowLimits
from stratagem.input.service.worker_job import WorkerJob
from stratagem.input.sources.source import Source
from stratagem.launch.processes.local_processes import LocalProcesses, SharedStandby
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.launch.remote.ray.ray_cluster import own_host
from stratagem.resources import Closing

# `WorkerServer`: reads splits of datasets, and hands their batches to consumers.

_RETRY_S = 0.2
_ANY_PORT = "%port%"


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """Settings of a `WorkerServer`.

    Args:
        dispatcher_address: address of the dispatcher, with or without `tcp://`.
        worker_address: address for consumers and for `DispatcherConfig.worker_addresses`: a host,
            or host:port; `%port%` stands for the port. None for loopback.
        port: port to listen on; 0 picks a free one.
        protocol: "tcp" or None.
        heartbeat_interval_ms: ignored; the dispatcher sets the interval.
        dispatcher_timeout_ms: how long `start` waits for the dispatcher; None for
            `STRATAGEM_PEER_TIMEOUT_S`.
        data_transfer_protocol: None; one machine uses shared memory by itself.
        data_transfer_address: None; batches come from `worker_address`.
        worker_tags: names that `DispatchServer.describe` shows.
        cross_trainer_cache_bytes: size of the window of a job with `CrossTrainerCache`.

    Example:
        >>> config = sg.input.service.WorkerConfig("10.0.0.1:5050", worker_address="10.0.0.2")
        >>> config.port
        0

    Source: TF 2.21 server_lib.py, WorkerConfig.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None
    worker_tags: list[str] | None = None
    cross_trainer_cache_bytes: int = dataclasses.field(default=2**30, kw_only=True)

    def __post_init__(self) -> None:
        split_address(self.dispatcher_address)
        check_protocol(self.protocol)
        check_protocol(self.data_transfer_protocol)
        if self.data_transfer_address is not None:
            raise ValueError(
                explain(
                    f"WorkerConfig received data_transfer_address={self.data_transfer_address!r}.",
                    expected="None: batches come from worker_address.",
                    fix="omit it.",
                )
            )

    @property
    def host(self) -> str:
        """Host of the worker."""
        if self.worker_address is None:
            return "127.0.0.1"
        address = without_scheme(self.worker_address)
        return address.rpartition(":")[0] or address

    @property
    def timeout_s(self) -> float:
        """Seconds that `start` waits for the dispatcher."""
        if self.dispatcher_timeout_ms is None:
            return float(settings.read("peer_timeout_s"))
        return self.dispatcher_timeout_ms / 1000


class WorkerServer(Closing):
    """Reads splits of datasets that a dispatcher gives it, and hands their batches to consumers.

    It waits for a dispatcher that is away, and begins anew if the dispatcher has given it up.

    Args:
        config: settings.
        start: joins at once; else after `start()`.

    Raises:
        OSError: the port is taken.
        UnavailableError: the dispatcher did not answer in time.
        ValueError: the dispatcher does not expect this worker, or there is no secret for its host.

    Example:
        >>> dispatcher = sg.input.service.DispatchServer()
        >>> config = sg.input.service.WorkerConfig(dispatcher.target)
        >>> with sg.input.service.WorkerServer(config):
        ...     print(len(dispatcher.describe()["workers"]))
        1
        >>> dispatcher.stop()

    Source: TF 2.21 server_lib.py, WorkerServer.
    """

    def __init__(self, config: WorkerConfig, start: bool = True) -> None:
        self._config = config
        self._limits = WindowLimits(shared_bytes=config.cross_trainer_cache_bytes)
        self._counts = ReadCounts()
        self._listener: Listener | None = None
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._jobs: dict[str, WorkerJob] = {}
        self._sources: dict[str, Source] = {}
        if start:
            self.start()

    def start(self) -> None:
        """Begins to listen, and joins the dispatcher.

        Example:
            >>> dispatcher = sg.input.service.DispatchServer()
            >>> config = sg.input.service.WorkerConfig(dispatcher.target)
            >>> worker = sg.input.service.WorkerServer(config, start=False)
            >>> worker.start()
            >>> worker.stop()
            >>> dispatcher.stop()

        Source: TF 2.21 server_lib.py, WorkerServer.start.
        """
        if self._listener is not None:
            return
        config, target = self._config, tcp_address(self._config.dispatcher_address)
        self._pickle: Any = load(
            "cloudpickle", needed_by="the input service", install="stratagem[ray]"
        )
        self._dispatcher = Connections(service_keys(target), [target], peers="Input dispatcher")
        keys = service_keys(join_address(config.host, config.port or 1))
        self._listener = Listener(
            keys, self._handle, host=bind_host(config.host), port=config.port, num_threads=2
        )
        port = split_address(self._listener.address)[1]
        self.address = tcp_address(join_address(config.host, port))
        self._begin_anew()
        try:
            self._watch(limit_s=config.timeout_s)
        except BaseException:
            self.stop()
            raise
        self._watching = threading.Thread(
            target=self._keep_watching, name="input worker", daemon=True
        )
        self._watching.start()

    def _begin_anew(self) -> None:
        """Takes a new name: the dispatcher has given the splits of the former one away."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.close()
        self._name = uuid.uuid4().hex
        self._seen = 0
        self._view: dict[str, Any] = {"runs": {}, "revoked": []}

    def _keep_watching(self) -> None:
        while not self._has_ended.is_set():
            try:
                self._watch(limit_s=None)
            except (UnavailableError, ServerError, ValueError):
                self._has_ended.wait(_RETRY_S)

    def _watch(self, *, limit_s: float | None) -> None:
        """Asks the dispatcher for news, and carries them out."""
        with self._lock:
            jobs = {**self._jobs}
        fields = {
            "worker": self._name,
            "address": self.address,
            "tags": self._config.worker_tags or [],
            "seen": self._seen,
            **self._counts.as_json(),
            "reading": [one for job in jobs.values() for one in job.reading()],
        }
        answer = self._dispatcher.ask(0, Message("watch_worker", fields), timeout_s=limit_s)
        if answer.kind == "refused":
            raise ValueError(answer.fields["text"])
        if answer.kind == "view":
            if answer.fields["view"].get("is_lost"):
                self._begin_anew()
                return
            self._view, self._seen = answer.fields["view"], answer.fields["checksum"]
        self._follow(jobs, self._view["runs"])
        for run, split, attempt in self._view["revoked"]:
            if run in jobs:
                jobs[run].revoke(split, attempt)

    def _follow(self, jobs: dict[str, WorkerJob], runs: dict[str, Any]) -> None:
        """Ends jobs that are over, and begins new ones."""
        for run in jobs.keys() - runs.keys():
            jobs.pop(run).close()
        for run in runs.keys() - jobs.keys():
            try:
                jobs[run] = self._make_job(run, runs[run])
            except UnavailableError:
                raise
            except Exception as error:  # noqa: BLE001 - sent to the consumers
                described = describe_open_error(error)
                self._ask(Message("fail", {"run": run, "worker": self._name, "error": described}))
        for run, job in jobs.items():
            job.update(runs[run])
        with self._lock:  # Only now: requests of consumers that these views lack would be refused.
            self._jobs = jobs

    def _make_job(self, run: str, spec: dict[str, Any]) -> WorkerJob:
        return WorkerJob(
            run,
            spec,
            self._source_of(spec["dataset_id"]),
            worker=self._name,
            ask=self._ask,
            limits=self._limits,
            counts=self._counts,
        )

    def _source_of(self, dataset_id: str) -> Source:
        if dataset_id not in self._sources:
            answer = self._ask(Message("dataset", {"dataset_id": dataset_id}))
            self._sources[dataset_id] = self._pickle.loads(answer.arrays[0].tobytes())
        return self._sources[dataset_id]

    def _ask(self, message: Message) -> Message:
        return self._dispatcher.ask(0, message)

    def _handle(self, request: Request) -> None:
        fields = request.message.fields
        with self._lock:
            job = self._jobs.get(fields["run"])
        if job is None:  # It may be about to begin, or it is over.
            request.answer(Message("moved"))
            return
        handle = {
            "next_batch": job.next_batch,
            "batch_at": job.batch_at,
            "received": job.received,
            "confirm": job.confirm,
        }
        handle[request.message.kind](request)

    def stop(self) -> None:
        """Leaves the dispatcher, which gives the rest of its splits to other workers.

        Source: TF 2.21 server_lib.py, WorkerServer.stop.
        """
        if self._listener is None or self._has_ended.is_set():
            return
        self._has_ended.set()
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.close()
        with contextlib.suppress(UnavailableError, ServerError):  # It notices later.
            self._dispatcher.ask(0, Message("stop_worker", {"worker": self._name}), timeout_s=2)
        self._dispatcher.close()
        self._listener.close()

    def close(self) -> None:
        """Stops the worker."""
        self.stop()

    def join(self) -> None:
        """Blocks until the server is stopped.

        Source: TF 2.21 server_lib.py, WorkerServer.join.
        """
        self._has_ended.wait()


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

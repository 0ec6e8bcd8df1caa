"""Input workers: `WorkerServer` answers requests for batches, and `start` runs several.

A trainer asks for one batch by dataset, epoch, split and index. The answer is the batch, the end of
the split, or an error of reading it. A dataset that is not here is "unknown": the trainer sends it,
and asks again. After a second without an answer it is "wait", with a count that grows while the
split is read, so that the trainer can tell a long way from a stuck worker.

Nothing here is a promise. A split that is asked for is opened and read ahead, as a cache; what is
not in it is read again, in this process or any other. Only data that may differ when they are read
again are not: they are "lost" with the worker that read them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
import traceback
import uuid
from collections.abc import Collection
from typing import Any

import jax

from stratagem import environment, logs, settings
from stratagem.cluster.addresses import (
    ip_address,
    is_loopback,
    join_address,
    split_address,
    without_scheme,
)
from stratagem.environment import load
from stratagem.errors import (
    PoisonExampleError,
    UnavailableError,
    check_choice,
    check_number,
    explain,
)
from stratagem.group.authentication.secret import find_secret
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import ZSTD, checked_compression, pack_batch
from stratagem.input.service.address_book import (
    BookClient,
    DispatcherConfig,
    DispatchServer,
    service_keys,
    tcp_address,
)
from stratagem.input.service.splits import SplitPlan, file_of_split, read_split
from stratagem.input.sources.source import Source
from stratagem.launch.prefork.fork_server import SharedStandby
from stratagem.launch.processes import LocalProcesses, RayProcesses
from stratagem.launch.remote.ray_cluster import (
    RayCluster,
    is_connected,
    load_ray,
    own_host,
)
from stratagem.resources import Closing

# Errors of reading a batch: where they happened, for the trainers.

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def describe_read_error(
    error: BaseException, source: Source, plan: SplitPlan, *, epoch: int, split: int, index: int
) -> dict[str, Any]:
    """Returns an error of reading a batch as JSON, with the file and the function that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_OWN_FOLDER) and _INSTALLED not in frame.filename
    ]
    place = (own or frames)[-1] if frames else None
    file = file_of_split(source, plan, split)
    return {
        "kind": "read",
        "split": split,
        "index": index,
        "epoch": epoch,
        "file": None if file is None else str(file),
        "function": place and place.name,
        "source_file": place and place.filename,
        "line": place and place.lineno,
        **_told(error),
    }


def describe_open_error(error: Exception) -> dict[str, Any]:
    """Returns an error of unpickling a dataset as JSON."""
    return {"kind": "open", **_told(error)}


def _told(error: BaseException) -> dict[str, str]:
    trace = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "text": str(error), "trace": trace}


def read_error(described: dict[str, Any]) -> Exception:
    """Returns the error of a described one, for the trainer."""
    if described["kind"] == "open":
        return RuntimeError(
            explain(
                f"An input worker could not load the dataset: {described['type']}: "
                f"{described['text']}",
                expected="a worker with the same modules as the process that registered it.",
                fix=f"install the modules there. The worker's traceback:\n{described['trace']}",
            )
        )
    return PoisonExampleError(
        explain(
            f"An input worker could not read {_place(described)}",
            expected="a dataset whose functions accept all examples.",
            fix=f"correct the example or the function, or pass skip_errors. The worker's "
            f"traceback:\n{described['trace']}",
            code="SG312",
        )
    )


def skip_warning(described: dict[str, Any]) -> str:
    """Returns the warning of a batch that was skipped."""
    return explain(
        f"An input worker skipped {_place(described)}",
        expected="a dataset whose functions accept all examples.",
        fix="nothing, if this example may be missed. Else correct it or the function.",
    )


def _place(described: dict[str, Any]) -> str:
    where = f"batch {described['index']} of split {described['split']}"
    if described["file"] is not None:
        where = f"batch {described['index']} of the file {described['file']}"
    place = f"{described['function']} ({described['source_file']}, line {described['line']})"
    return (
        f"{where} in epoch {described['epoch']}: {place} raised {described['type']}: "
        f"{described['text']}"
    )


_MOST_BYTES = 2**29  # of the batches that all streams hold, beside one for each
# A request so far ahead of a stream opens another one, if that is possible without reading through.
_FAR = 64
_PATIENCE_S = 1.0  # of requests that wait


class _Held:
    """Size of the batches of all streams of a worker. All methods are called under its lock."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._waiting: set[threading.Condition] = set()  # for room

    @property
    def is_full(self) -> bool:
        """True if there is no room for more."""
        return self.num_bytes >= _MOST_BYTES

    def has_room(self, changed: threading.Condition) -> bool:
        """Returns True if there is room for more; else `changed` is notified once there is."""
        if self.is_full:
            self._waiting.add(changed)
        return not self.is_full

    def add(self, num_bytes: int) -> None:
        """Counts batches, or what is dropped as a negative number."""
        self.num_bytes += num_bytes
        while self._waiting and not self.is_full:
            self._waiting.pop().notify_all()


class _Stream:
    """A split that is being read. All methods are called under the lock of the worker.

    `first` is the first batch that it still has or reads, `next` the one that it reads now. It has
    ended if `length` or `error` is set.
    """

    def __init__(
        self, lock: threading.Lock, held: _Held, can_seek: bool, first: int, run: str | None
    ) -> None:
        self._held = held
        self.run = run
        self.first = self.next = first
        self.trainers: set[str] = set()
        self.asked_s = time.monotonic()
        self._can_seek = can_seek
        self._changed = threading.Condition(lock)
        self._until = first
        self._batches: dict[int, Message] = {}
        self._num_steps = 0
        self._last: Any = None
        self._length: int | None = None
        self._error: dict[str, Any] | None = None
        self._waiting: list[tuple[int, Request]] = []
        self._is_closed = self._is_compressed = False
        self._looked_s = self.asked_s

    def has(self, index: int) -> bool:
        """Returns True if a batch is here, or will come without another stream."""
        if index < self.first or self._is_closed:
            return False
        if not self._can_seek:
            return True
        return index <= self.next if self._error else index <= max(self.next, self._until) + _FAR

    def ask(self, request: Request) -> None:
        """Answers a request at once or once the batch is read, and reads as far ahead as asked."""
        fields = request.message.fields
        index = fields["index"]
        self.asked_s = time.monotonic()
        self.trainers.add(fields["trainer"])
        self._is_compressed = fields["is_compressed"]
        self._until = max(self._until, index + fields["ahead"])
        keep = fields["keep"] - (0 if self._held.is_full else fields["behind"])
        while self.first < min(keep, index, self.next):
            self._drop(self.first)
            self.first += 1
        self._waiting.append((index, request))
        self._answer()
        self._changed.notify_all()

    def _answer(self, *, is_late: bool = False) -> None:
        """Answers the requests that can be; all of them if it is late."""
        waiting, self._waiting = self._waiting, []
        for index, request in waiting:
            answer = self._found(index, request.message.fields)
            if answer is None and (is_late or self._is_closed):
                answer = Message("wait", {"num_steps": self._num_steps})
            if answer is None:
                self._waiting.append((index, request))
            else:
                request.answer(answer)

    def _found(self, index: int, fields: dict[str, Any]) -> Message | None:
        if index < self.next:
            return self._batches[index]
        if self._error is not None:
            if index > self.next and self._can_seek:  # Asked again, it gets another stream.
                return Message("wait", {"num_steps": self._num_steps})
            return Message("failed", {"error": self._error})
        if self._length is None:
            return None
        if not fields["is_round"] or fields["from"] >= self._length:
            return Message("end")
        # The round has batches for other trainers; this one stays in step.
        empty = pack_batch(jax.tree.map(_without_rows, self._last))
        return Message("end", empty.fields, empty.arrays)

    def look(self, now_s: float) -> None:
        """Answers requests that have waited for long."""
        if self._waiting and now_s >= self._looked_s + _PATIENCE_S:
            self._looked_s = now_s
            self._answer(is_late=True)

    def close(self) -> None:
        """Ends the reading."""
        self._is_closed = True
        self._answer()
        for index in [*self._batches]:
            self._drop(index)
        self._changed.notify_all()

    def is_over(self, idle_since_s: float) -> bool:
        """Returns True if it may be closed for room: read to the end, or not asked for lately."""
        has_ended = self._length is not None or self._error is not None
        is_idle = has_ended or self.asked_s < idle_since_s
        return is_idle and self.run is None and not self._waiting

    def _drop(self, index: int) -> None:
        dropped = self._batches.pop(index, None)
        self._held.add(0 if dropped is None else -_size(dropped))

    def _note_skipped(self) -> None:
        self._num_steps += 1

    # The thread that reads: without the lock.

    def read(
        self, source: Source, plan: SplitPlan, *, epoch: int, split: int, keeps_last: bool
    ) -> None:
        """Reads the split until it ends or the stream is closed."""
        place = {"epoch": epoch, "split": split}
        batches = read_split(
            source, plan, **place, first=self.next, note_skipped=self._note_skipped
        )
        with contextlib.closing(batches):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or self._has_room())
                    if self._is_closed:
                        return
                    is_compressed = self._is_compressed
                try:
                    batch = next(batches)
                    message = pack_batch(batch, is_compressed=is_compressed)
                except StopIteration:
                    with self._changed:
                        self._length = self.next
                        self._answer()
                    return
                except BaseException as error:  # noqa: BLE001 - sent to the trainer
                    described = describe_read_error(error, source, plan, **place, index=self.next)
                    with self._changed:
                        self._error = described
                        self._answer()
                    return
                with self._changed:
                    if self._is_closed:
                        return
                    self._last = batch if keeps_last else None
                    self._batches[self.next] = message
                    self._held.add(_size(message))
                    self._num_steps += 1
                    self.next += 1
                    self._answer()

    def _has_room(self) -> bool:
        if any(index >= self.next for index, *_ in self._waiting):
            return True
        if self.next > self._until:
            return False
        return not self._batches or self._held.has_room(self._changed)


def _size(message: Message) -> int:
    return sum(array.nbytes for array in message.arrays)


def _without_rows(leaf: Any) -> Any:
    return leaf[:0] if getattr(leaf, "ndim", 0) else leaf


_TICK_S, _RETRY_S = 0.25, 0.2
_MOST_SOURCES, _MOST_GONE = 64, 64
_IDLE_S = 600.0
_IDLE_WITHOUT_ROOM_S = 10.0


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """Settings of a `WorkerServer`.

    Args:
        dispatcher_address: address of the dispatcher, with or without `tcp://`.
        worker_address: address for trainers: a host, or host:port; `%port%` stands for the port.
            None for loopback.
        port: port to listen on; 0 picks a free one.
        protocol: "tcp" or None.
        dispatcher_timeout_ms: how long `start` waits for the dispatcher; None for
            `STRATAGEM_PEER_TIMEOUT_S`.
        worker_tags: names that `DispatchServer.describe` shows.

    Raises:
        ValueError: an address without a port, or another protocol.

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
    dispatcher_timeout_ms: int | None = None
    worker_tags: list[str] | None = None

    def __post_init__(self) -> None:
        split_address(self.dispatcher_address)
        check_choice("WorkerConfig", (None, "tcp"), protocol=self.protocol)


class WorkerServer(Closing):
    """Reads datasets for trainers, and announces its address at a dispatcher.

    It goes on while the dispatcher is away, and announces itself again.

    Args:
        config: settings.
        start: joins at once; else after `start()`.

    Raises:
        OSError: the port is taken.
        UnavailableError: the dispatcher did not answer in time.
        ValueError: there is no secret for its host.

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
        # Name and number of the workers that are started together; this one alone, unless set
        # before `start`.
        self.group: tuple[str, int] = (uuid.uuid4().hex, 1)
        self._listener: Listener | None = None
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}  # oldest first
        self._streams: dict[str, list[_Stream]] = {}  # by split
        self._held = _Held()
        self._gone: collections.deque[str] = collections.deque(maxlen=_MOST_GONE)
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
        config, host = self._config, "127.0.0.1"
        if config.worker_address is not None:
            address = without_scheme(config.worker_address)
            host = address.rpartition(":")[0] or address
        limit_s = float(settings.read("peer_timeout_s"))
        if config.dispatcher_timeout_ms is not None:
            limit_s = config.dispatcher_timeout_ms / 1000
        self._pickle: Any = load(
            "cloudpickle", needed_by="the input service", install="stratagem[ray]"
        )
        self._book = BookClient(config.dispatcher_address)
        keys = service_keys(join_address(host, config.port or 1))
        self._listener = Listener(keys, self._handle, host=ip_address(host), port=config.port)
        self._local = self._listener.local
        port = split_address(self._listener.address)[1]
        self.address = tcp_address(join_address(host, port))
        try:
            interval_s = self._announce(limit_s)
        except BaseException:
            self.stop()
            raise
        for target, arguments in ((self._keep_announcing, (interval_s,)), (self._keep_looking, ())):
            threading.Thread(
                target=target, args=arguments, name="input worker", daemon=True
            ).start()

    def _announce(self, limit_s: float) -> float:
        """Tells the dispatcher the address; returns the seconds until the next time."""
        answer = self._book.ask(
            "announce",
            limit_s=limit_s,
            address=self.address,
            local=self._local,
            tags=self._config.worker_tags or [],
            group=self.group,
        )
        return answer.fields["interval_s"]

    def _keep_announcing(self, interval_s: float) -> None:
        while not self._has_ended.wait(interval_s):
            try:
                interval_s = self._announce(limit_s=10 * interval_s)
            except (UnavailableError, ServerError):
                interval_s = max(interval_s, _RETRY_S)

    def _keep_looking(self) -> None:
        """Answers requests that wait, and closes streams that nobody has asked for long."""
        while not self._has_ended.wait(_TICK_S):
            now_s = time.monotonic()
            idle_since_s = now_s - _IDLE_S
            with self._lock:
                streams = self._all_streams()
                for one in streams:
                    one.look(now_s)
                # A trainer that is lost says nothing. Data that are read once wait for theirs.
                self._close(
                    {one for one in streams if one.run is None and one.asked_s < idle_since_s}
                )
                self._make_room(now_s - _IDLE_WITHOUT_ROOM_S)

    def _all_streams(self) -> list[_Stream]:
        return [one for streams in self._streams.values() for one in streams]

    def _close(self, over: Collection[_Stream]) -> None:
        for one in over:
            one.close()
        if over:
            left = {
                split: [one for one in streams if one not in over]
                for split, streams in self._streams.items()
            }
            self._streams = {split: streams for split, streams in left.items() if streams}

    def _make_room(self, idle_since_s: float) -> None:
        """Closes streams if all together hold too much, those asked for least recently first.

        Other consumers may still want what a stream has: it is then read again.
        """
        for one in sorted(self._all_streams(), key=lambda stream: stream.asked_s):
            if not self._held.is_full:
                return
            if one.is_over(idle_since_s):
                self._close({one})

    def _handle(self, request: Request) -> None:
        fields = request.message.fields
        if request.message.kind == "batch":
            self._ask(request)
        elif request.message.kind == "dataset":
            self._take_dataset(request)
        else:
            with self._lock:
                self._gone.append(fields["trainer"])
                streams = self._all_streams()
                for one in streams:
                    one.trainers.discard(fields["trainer"])
                self._close({one for one in streams if not one.trainers})
            request.answer(Message("noted"))

    def _take_dataset(self, request: Request) -> None:
        answer = Message("noted")
        try:
            source = self._pickle.loads(request.message.arrays[0].tobytes())
        except Exception as error:  # noqa: BLE001 - sent to the trainer
            answer = Message("failed", {"error": describe_open_error(error)})
        else:
            with self._lock:
                self._sources[request.message.fields["dataset"]] = source
                if len(self._sources) > _MOST_SOURCES:
                    del self._sources[next(iter(self._sources))]
        request.answer(answer)

    def _ask(self, request: Request) -> None:
        fields = request.message.fields
        if fields["is_compressed"]:
            try:
                checked_compression(ZSTD)
            except ImportError as error:
                request.answer(Message("failed", {"error": describe_open_error(error)}))
                return
        with self._lock:
            self._close_taken(fields)
            # What a trainer asked for just before it went may come later, by another connection.
            if self._has_ended.is_set() or fields["trainer"] in self._gone:
                request.answer(Message("wait", {"num_steps": 0}))
            elif fields["dataset"] not in self._sources:
                request.answer(Message("unknown"))
            elif (stream := self._stream_of(fields)) is None:
                request.answer(Message("lost"))
            else:
                stream.ask(request)

    def _close_taken(self, fields: dict[str, Any]) -> None:
        """Closes the streams of splits that their trainers have taken to the end."""
        for split, run in fields["taken"]:
            streams = self._streams.get(_name_of(fields, split, run), [])
            for one in streams:
                one.trainers.discard(fields["trainer"])
            self._close({one for one in streams if not one.trainers})

    def _stream_of(self, fields: dict[str, Any]) -> _Stream | None:
        """Returns the stream of a batch, a new one if it may be read again or for the first time.

        Batches are shared by all trainers, but those that may differ when they are read again are
        of one `run`.
        """
        source = self._sources[fields["dataset"]] = self._sources.pop(fields["dataset"])
        epoch, split, run = fields["epoch"], fields["split"], fields["run"]
        for stream in self._streams.get(_name_of(fields, split, run), []):
            if stream.has(fields["index"]):
                return stream
        if run is not None and not fields["is_new"]:
            return None
        self._make_room(time.monotonic() - _IDLE_WITHOUT_ROOM_S)
        streams = self._streams.setdefault(_name_of(fields, split, run), [])
        stream = _Stream(self._lock, self._held, fields["can_seek"], fields["from"], run)
        streams.append(stream)
        threading.Thread(
            target=stream.read,
            args=(source, SplitPlan(*fields["plan"])),
            kwargs={"epoch": epoch, "split": split, "keeps_last": fields["is_round"]},
            name="input reader",
            daemon=True,
        ).start()
        return stream

    def stop(self) -> None:
        """Leaves the dispatcher; trainers ask other workers.

        Source: TF 2.21 server_lib.py, WorkerServer.stop.
        """
        if self._listener is None or self._has_ended.is_set():
            return
        self._has_ended.set()
        with self._lock:
            self._close({*self._all_streams()})
        with contextlib.suppress(UnavailableError, ServerError):  # It notices later.
            self._book.ask("leave", limit_s=2, address=self.address)
        self._book.close()
        self._listener.close()

    def close(self) -> None:
        """Stops the worker."""
        self.stop()

    def join(self) -> None:
        """Blocks until the server is stopped.

        Source: TF 2.21 server_lib.py, WorkerServer.join.
        """
        self._has_ended.wait()


def _name_of(fields: dict[str, Any], split: int, run: str | None) -> str:
    """Returns the key of the streams of a split of a request's epoch."""
    return f"{fields['dataset']} {fields['epoch']} {split} {fields['plan']} {run}"


def serve_input_worker(
    index: int, dispatcher: str, host: str | None, group: tuple[str, int]
) -> WorkerServer:
    """Returns a worker in its process; without a host, on loopback if its dispatcher is."""
    if host is None and not is_loopback(split_address(dispatcher)[0]):
        host = own_host()
    worker = WorkerServer(WorkerConfig(dispatcher, worker_address=host), start=False)
    worker.group = group
    worker.start()
    return worker


# Workers as processes on this machine or as Ray actors, and with a dispatcher.

_logger = logging.getLogger(__name__)
_KIND = "input worker"
# Accelerators and the tasks of a cluster belong to trainers.
_VARIABLES = {"JAX_PLATFORMS": "cpu", "TF_CONFIG": "", "STRATAGEM_SLURM_JOBS": ""}
_MODULES = ("cloudpickle", "zmq", "stratagem.input.service.workers")


class InputWorkers(Closing):
    """Input workers in `processes`, each started again when it dies.

    Args:
        dispatcher: address of their dispatcher.
        count: number of workers.
        on_ray: places them by Ray, which this process is connected to; else they are forked here.
        host: address of this machine for trainers; None for loopback, or that of Ray.

    Raises:
        RuntimeError: a worker cannot start.
        UnavailableError: a worker has died at its start.
    """

    def __init__(
        self, dispatcher: str, count: int, *, on_ray: bool = False, host: str | None = None
    ) -> None:
        arguments = count * [(dispatcher, host, (uuid.uuid4().hex, count))]
        with contextlib.ExitStack() as stack:
            self._book = stack.enter_context(BookClient(dispatcher))
            self.processes: LocalProcesses | RayProcesses
            if on_ray:
                secret = find_secret()
                variables = {**_VARIABLES, **(secret.variables() if secret is not None else {})}
                self.processes = RayProcesses(
                    _KIND, serve_input_worker, arguments, environment=variables, modules=_MODULES
                )
            else:
                variables = {**environment.snapshot(), **_VARIABLES}
                standby = stack.enter_context(SharedStandby(_MODULES, variables))
                self.processes = LocalProcesses(
                    _KIND, serve_input_worker, arguments, standby=standby
                )
            stack.callback(self.processes.close)
            self._addresses = self.processes.addresses
            self.processes.watch(self._lose, self._find, _give_up)
            self._closing = stack.pop_all()

    def _lose(self, index: int, reason: str) -> None:
        """Tells the dispatcher, which would notice later; if it is away, trainers notice."""
        with contextlib.suppress(UnavailableError, ServerError):
            self._book.ask("leave", limit_s=2.0, address=self._addresses[index])

    def _find(self, index: int, address: str) -> None:
        self._addresses[index] = address

    def close(self) -> None:
        """Ends all workers."""
        self._closing.close()


def _give_up(index: int, error: Exception) -> None:
    logs.announce(_logger, str(error))


class InputService(Closing):
    """A dispatcher and its workers, made by `start`; a context manager.

    Args:
        config: settings of the dispatcher.
        num_workers: number of workers.
        on_ray: places the workers by Ray, which this process is connected to.

    Raises:
        OSError: the port is taken.
        RuntimeError: a worker cannot start.
        UnavailableError: a worker has died at its start.

    Example:
        >>> config = sg.input.service.DispatcherConfig()
        >>> with sg.input.service.InputService(config, 0) as service:  # workers may join later
        ...     service.num_workers
        0

    Source: specific to Stratagem.
    """

    def __init__(self, config: DispatcherConfig, num_workers: int, *, on_ray: bool = False) -> None:
        self.num_workers = num_workers
        with contextlib.ExitStack() as stack:
            self._dispatcher = stack.enter_context(DispatchServer(config))
            host = None if on_ray else config.host
            self._workers = stack.enter_context(
                InputWorkers(self.target, num_workers, on_ray=on_ray, host=host)
            )
            self._closing = stack.pop_all()

    @property
    def target(self) -> str:
        """Address for `distribute`, as `tcp://host:port`."""
        return self._dispatcher.target

    def close(self) -> None:
        """Stops the workers, then the dispatcher."""
        self._closing.close()


def start(num_workers: int) -> InputService:
    """Starts a dispatcher and input workers, which are started again when they die.

    The workers are processes of this machine. If this process is connected to Ray, or `RAY_ADDRESS`
    is set, Ray spreads them over its machines. The dispatcher is part of this process.

    Args:
        num_workers: number of workers.

    Returns:
        The running service, to use in a `with` block; its `target` is the address for `distribute`.

    Raises:
        RuntimeError: a worker cannot start, because of an error in it.
        UnavailableError: a worker has died at its start, or Ray does not answer.
        ValueError: a number below 1, or Ray has several machines and the run has no secret.

    Example:
        >>> with sg.input.service.start(2) as service:
        ...     distribute = sg.input.service.distribute("distributed_epoch", service.target)
        ...     dataset = sg.input.Dataset(np.arange(6), batch_size=2).apply(distribute)
        ...     print([batch.tolist() for batch in dataset])
        [[0, 1], [2, 3], [4, 5]]

    Source: specific to Stratagem.
    """
    check_number("sg.input.service.start", num_workers=num_workers)
    if environment.lookup("RAY_ADDRESS") is None and not is_connected():
        return InputService(DispatcherConfig(), num_workers)
    RayCluster().wait()
    is_one = sum(node["Alive"] for node in load_ray().nodes()) == 1
    config = DispatcherConfig(host="127.0.0.1" if is_one else own_host())
    return InputService(config, num_workers, on_ray=True)

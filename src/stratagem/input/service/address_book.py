"""`DispatchServer`: the address book of input workers, and the datasets that have an id.

Workers announce their addresses again and again, and say when they leave. Trainers ask for the list
every half second, and for a registered dataset once. Nothing else is known here: batches and
positions are between trainers and workers. While no book answers, trainers go on with the workers
that they know; a book that is started again at the same address hears from its workers within an
interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from typing import Any

import numpy as np

from stratagem import settings
from stratagem.cluster.addresses import ip_address, is_loopback, split_address
from stratagem.errors import NotFoundError, check_choice, explain, invalid
from stratagem.group.authentication.secret import Secret, key_of, new_secret, required_secret
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.resources import Closing, cache_dir

# Keys of the connections of the input service, from the secret of the run or of this user.

_WHO = "The input service"
_FILE = "input_service.secret"


def service_keys(address: str) -> ClusterKeys:
    """Returns the keys for the service at an address, the same in all processes of a run.

    Without a secret of the run, and on loopback only, they are those of this user on this machine:
    datasets are pickled, so other users must not be able to register one. Raises ValueError without
    a secret for another host.
    """
    host = split_address(address)[0]
    secret = required_secret(_WHO, [host])
    if secret is None and is_loopback(host):
        secret = _secret_of_user()
    return ClusterKeys(key_of(secret, "input"))


def _secret_of_user() -> Secret:
    """Returns a secret in a file that only this user can read, and makes it at first use."""
    path = cache_dir() / _FILE
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"{_FILE}.{os.getpid()}")
    if not path.exists():
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):  # Another process was first.
            os.link(own, path)
        own.unlink()
    with open(path, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to another user, or others can read it")
        return Secret(file.read().strip(), f"The file {path}")


def tcp_address(address: str) -> str:
    """Returns `tcp://host:port`; raises ValueError for an invalid address."""
    host, port = split_address(address)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


_REFUSALS: dict[str, type[Exception]] = {"NotFoundError": NotFoundError, "ValueError": ValueError}


class BookClient(Closing):
    """A connection to a `DispatchServer`; thread-safe. `address` is with or without `tcp://`."""

    def __init__(self, address: str) -> None:
        self.target = tcp_address(address)
        self._connections = Connections(
            service_keys(self.target), [self.target], peers="Input dispatcher"
        )

    def ask(
        self,
        kind: str,
        arrays: tuple[np.ndarray, ...] = (),
        *,
        limit_s: float | None = None,
        **fields: Any,
    ) -> Message:
        """Returns the answer to a request; raises the error if it is refused."""
        answer = self._connections.ask(0, Message(kind, fields, arrays), timeout_s=limit_s)
        if answer.kind == "refused":
            raise _REFUSALS[answer.fields["kind"]](answer.fields["text"])
        return answer

    def close(self) -> None:
        """Closes the connection; threads that wait for an answer get an UnavailableError."""
        self._connections.close()


_MOST_INTERVAL_S = 1.0  # between the announcements of a worker
_ID_CHARACTERS = 32


@dataclasses.dataclass(frozen=True)
class DispatcherConfig:
    """Settings of a `DispatchServer`.

    Args:
        port: port to listen on; 0 picks a free one.
        protocol: "tcp"; one machine uses Unix sockets and shared memory by itself.
        worker_timeout_ms: how long a worker may be silent before it is lost; None for
            `STRATAGEM_PEER_TIMEOUT_S`.
        host: address of this machine to listen on.

    Raises:
        ValueError: another protocol.

    Example:
        >>> sg.input.service.DispatcherConfig(port=5050).protocol
        'tcp'

    Source: TF 2.21 server_lib.py, DispatcherConfig.
    """

    port: int = 0
    protocol: str | None = "tcp"
    worker_timeout_ms: int | None = None
    host: str = dataclasses.field(default="127.0.0.1", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("DispatcherConfig", (None, "tcp"), protocol=self.protocol)


@dataclasses.dataclass
class _Worker:
    """A worker that has announced itself; `local` is its Unix socket's address, or empty.

    `group` are the name and the number of the workers that are started together: an epoch that
    begins when some of them are there has a lane for each.
    """

    local: str
    tags: list[str]
    group: tuple[str, int]
    heard_s: float


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A registered dataset: its pickled source, and what must be the same under its id."""

    pickled: np.ndarray
    facts: dict[str, Any]
    compression: str | None


class DispatchServer(Closing):
    """Tells trainers where input workers are, and keeps registered datasets.

    Args:
        config: settings; None for the defaults.
        start: listens at once; else after `start()`.

    Raises:
        OSError: the port is taken.
        ValueError: the host is not loopback, and the run has no secret.

    Example:
        >>> dispatcher = sg.input.service.DispatchServer()
        >>> address = dispatcher.target.removeprefix("tcp://")
        >>> worker = sg.input.service.WorkerServer(sg.input.service.WorkerConfig(address))
        >>> dataset = sg.input.Dataset(np.arange(4), batch_size=2)
        >>> distribute = sg.input.service.distribute("distributed_epoch", dispatcher.target)
        >>> [batch.tolist() for batch in dataset.apply(distribute)]
        [[0, 1], [2, 3]]
        >>> worker.stop()
        >>> dispatcher.stop()

    Source: TF 2.21 server_lib.py, DispatchServer.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        self._config = config or DispatcherConfig()
        self._silence_s = (
            float(settings.read("peer_timeout_s"))
            if self._config.worker_timeout_ms is None
            else self._config.worker_timeout_ms / 1000
        )
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._datasets: dict[str, _Registered] = {}
        self._listener: Listener | None = None
        self._has_ended = threading.Event()
        if start:
            self.start()

    def start(self) -> None:
        """Begins to listen.

        Example:
            >>> dispatcher = sg.input.service.DispatchServer(start=False)
            >>> dispatcher.start()
            >>> dispatcher.stop()

        Source: TF 2.21 server_lib.py, DispatchServer.start.
        """
        if self._listener is None:
            config = self._config
            keys = service_keys(f"{config.host}:{config.port or 1}")
            host = ip_address(config.host)
            self._listener = Listener(keys, self._handle, host=host, port=config.port)

    @property
    def target(self) -> str:
        """Address for `distribute`, as `tcp://host:port`."""
        if self._listener is None:
            raise RuntimeError(
                explain(
                    "The dispatcher has not started.",
                    expected="a call of start() first.",
                    fix="call start(), or omit start=False.",
                )
            )
        return self._listener.address

    def stop(self) -> None:
        """Stops the server; trainers go on with the workers that they know.

        Source: TF 2.21 server_lib.py, DispatchServer.stop.
        """
        if self._listener is not None and not self._has_ended.is_set():
            self._has_ended.set()
            self._listener.close()

    def close(self) -> None:
        """Stops the server."""
        self.stop()

    def join(self) -> None:
        """Blocks until the server is stopped.

        Source: TF 2.21 server_lib.py, DispatchServer.join.
        """
        self._has_ended.wait()

    def describe(self) -> dict[str, Any]:
        """Returns the workers by address, with their tags, and the ids of datasets, as JSON."""
        with self._lock:
            self._forget_silent()
            workers = {address: {"tags": one.tags} for address, one in self._workers.items()}
            return {"workers": workers, "datasets": sorted(self._datasets)}

    def _handle(self, request: Request) -> None:
        message = request.message
        answers = {
            "announce": self._announce,
            "leave": self._leave,
            "readers": self._readers,
            "register": self._register,
            "dataset": self._dataset,
        }
        try:
            with self._lock:
                answer = answers[message.kind](message)
        except (NotFoundError, ValueError) as error:
            fields = {"kind": type(error).__name__, "text": str(error)}
            answer = Message("refused", fields)
        request.answer(answer)

    def _announce(self, message: Message) -> Message:
        fields = message.fields
        worker = _Worker(fields["local"], fields["tags"], fields["group"], time.monotonic())
        self._workers[fields["address"]] = worker
        return Message("noted", {"interval_s": min(_MOST_INTERVAL_S, self._silence_s / 4)})

    def _leave(self, message: Message) -> Message:
        self._workers.pop(message.fields["address"], None)
        return Message("noted")

    def _readers(self, message: Message) -> Message:
        self._forget_silent()
        workers = sorted(self._workers.items())
        readers = [f"{one} {worker.local}".rstrip() for one, worker in workers]
        groups = {worker.group[0]: worker.group[1] for _, worker in workers}
        fields = {"readers": readers, "num_expected": sum(groups.values())}
        return Message("readers", fields)

    def _forget_silent(self) -> None:
        before_s = time.monotonic() - self._silence_s
        for address in [one for one, worker in self._workers.items() if worker.heard_s < before_s]:
            del self._workers[address]

    def _register(self, message: Message) -> Message:
        fields = message.fields
        facts, compression = fields["facts"], fields["compression"]
        # A copy: the arrays of a request may be in memory that its client uses again.
        new = _Registered(np.array(message.arrays[0]), facts, compression)
        contents = hashlib.sha256(new.pickled.tobytes() + str(compression).encode()).hexdigest()
        dataset_id = fields["dataset_id"] or contents[:_ID_CHARACTERS]
        known = self._datasets.setdefault(dataset_id, new)
        if (known.facts, known.compression) != (facts, compression):
            raise invalid(
                f"dataset_id={dataset_id!r} is registered, with {known.facts} and "
                f"compression={known.compression!r}; received {facts} and {compression!r}.",
                expected="one dataset for an id.",
                fix="pass another dataset_id, or omit it.",
            )
        return Message("registered", {"dataset_id": dataset_id})

    def _dataset(self, message: Message) -> Message:
        dataset_id = message.fields["dataset_id"]
        if dataset_id not in self._datasets:
            raise NotFoundError(
                explain(
                    f"dataset_id={dataset_id!r} is not registered.",
                    expected=f"one of {sorted(self._datasets)}.",
                    fix="call sg.input.service.register_dataset first; a dispatcher that was "
                    "started again knows none.",
                )
            )
        known = self._datasets[dataset_id]
        fields = {"facts": known.facts, "compression": known.compression}
        return Message("dataset", fields, (known.pickled,))

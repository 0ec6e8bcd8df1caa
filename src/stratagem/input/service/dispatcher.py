"""`DispatchServer`: gives splits of registered datasets to input workers."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import socket
import threading
from typing import Any

from stratagem import settings
from stratagem.cluster.addresses import is_loopback, split_address
from stratagem.errors import explain
from stratagem.group.authentication.secret import Secret, key_of, new_secret, required_secret
from stratagem.group.transport.keys import ClusterKeys, load_zmq
from stratagem.group.transport.listener import Listener
from stratagem.input.service.dispatching import Dispatching
from stratagem.input.service.service_state import ServiceState
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
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:  # All networks of this machine.
            host = socket.gethostname()
    secret = required_secret(_WHO, [host])
    if secret is None and is_loopback(host):
        secret = _secret_of_user()
    z85 = load_zmq("zmq.utils.z85")
    public = load_zmq().curve_public
    pairs: list[bytes] = []
    for side in ("server", "client"):
        private = z85.encode(key_of(secret, f"input {side}"))
        pairs += [public(private), private]
    return ClusterKeys(*pairs)


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


def bind_host(host: str) -> str:
    """Returns the address of this machine to listen on. Raises OSError for an unknown host."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return socket.gethostbyname(host)


_TICK_S = 0.05
_GC_TIMEOUT_MS = 300_000


@dataclasses.dataclass(frozen=True)
class DispatcherConfig:
    """Settings of a `DispatchServer`.

    Args:
        port: port to listen on; 0 picks a free one.
        protocol: "tcp"; one machine uses Unix sockets and shared memory by itself.
        work_dir: folder of the journal, for `fault_tolerant_mode`.
        fault_tolerant_mode: keeps a journal, so that a dispatcher that is started again at the same
            port continues.
        worker_addresses: addresses of all workers, required by the static sharding policies. A host
            without a port stands for any worker of that host.
        job_gc_check_interval_ms: ignored; jobs are checked all the time.
        job_gc_timeout_ms: how long a job without consumers is kept; None for 5 minutes.
        worker_timeout_ms: how long a worker or consumer may be silent before it is lost; None for
            `STRATAGEM_PEER_TIMEOUT_S`.
        stuck_timeout_ms: how long the reading of one batch may take before its split is given to
            another worker; None for `STRATAGEM_STUCK_TIMEOUT_S`.
        host: address of this machine to listen on.

    Example:
        >>> sg.input.service.DispatcherConfig(port=5050).protocol
        'tcp'

    Source: TF 2.21 server_lib.py, DispatcherConfig.
    """

    port: int = 0
    protocol: str | None = "tcp"
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: list[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    stuck_timeout_ms: int | None = dataclasses.field(default=None, kw_only=True)
    host: str = dataclasses.field(default="127.0.0.1", kw_only=True)

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
        if self.fault_tolerant_mode and not self.work_dir:
            raise ValueError(
                explain(
                    "DispatcherConfig received fault_tolerant_mode=True without work_dir.",
                    expected="the folder of the journal.",
                    fix="pass work_dir, a folder that the next dispatcher can read, too.",
                )
            )

    @property
    def silence_s(self) -> float:
        """Seconds without a sign of life before a worker or consumer is lost."""
        if self.worker_timeout_ms is None:
            return float(settings.read("peer_timeout_s"))
        return self.worker_timeout_ms / 1000

    @property
    def stuck_s(self) -> float:
        """Seconds that the reading of one batch may take."""
        if self.stuck_timeout_ms is None:
            return float(settings.read("stuck_timeout_s"))
        return self.stuck_timeout_ms / 1000

    @property
    def gc_s(self) -> float:
        """Seconds that a job without consumers is kept."""
        timeout_ms = self.job_gc_timeout_ms
        return (_GC_TIMEOUT_MS if timeout_ms is None else timeout_ms) / 1000


def check_protocol(protocol: str | None) -> None:
    """Raises ValueError for a protocol other than TCP."""
    if protocol not in (None, "tcp"):
        raise ValueError(
            explain(
                f"protocol={protocol!r} is not supported.",
                expected='"tcp", which uses shared memory on one machine by itself.',
                fix="omit protocol.",
            )
        )


class DispatchServer(Closing):
    """Gives splits of registered datasets to input workers, and keeps account of them.

    Args:
        config: settings; None for the defaults.
        start: listens at once; else after `start()`.

    Raises:
        OSError: the port is taken, or the journal cannot be written.
        DataLossError: the journal is damaged.
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
        if self._listener is not None:
            return
        config = self._config
        keys = service_keys(f"{config.host}:{config.port or 1}")
        state = ServiceState(config.work_dir if config.fault_tolerant_mode else None)
        try:
            self._dispatching = Dispatching(
                state,
                silence_s=config.silence_s,
                stuck_s=config.stuck_s,
                gc_s=config.gc_s,
                worker_addresses=config.worker_addresses,
            )
            self._listener = Listener(
                keys, self._dispatching.handle, host=bind_host(config.host), port=config.port
            )
        except BaseException:
            state.close()
            raise
        self._state = state
        self._ticking = threading.Thread(target=self._tick, name="input dispatcher", daemon=True)
        self._ticking.start()

    def _tick(self) -> None:
        while not self._has_ended.wait(_TICK_S):
            self._dispatching.tick()

    @property
    def target(self) -> str:
        """Address for `distribute`, as `tcp://host:port`."""
        return self._started().address

    def _started(self) -> Listener:
        if self._listener is None:
            raise RuntimeError(
                explain(
                    "The dispatcher has not started.",
                    expected="a call of start() first.",
                    fix="call start(), or omit start=False.",
                )
            )
        return self._listener

    def stop(self) -> None:
        """Stops the server; jobs continue when it is started again with the same journal.

        Source: TF 2.21 server_lib.py, DispatchServer.stop.
        """
        if self._listener is None or self._has_ended.is_set():
            return
        self._has_ended.set()
        self._ticking.join()
        self._listener.close()
        self._state.close()

    def close(self) -> None:
        """Stops the server."""
        self.stop()

    def join(self) -> None:
        """Blocks until the server is stopped.

        Source: TF 2.21 server_lib.py, DispatchServer.join.
        """
        self._has_ended.wait()

    def describe(self) -> dict[str, Any]:
        """Returns the workers and jobs as JSON."""
        self._started()
        return self._dispatching.describe()

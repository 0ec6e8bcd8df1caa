"""Connection of this process to Ray, its token, and a local Ray where there is none.

Ray's processes on a machine are tied to the thread that started them, so that thread waits until
they end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from stratagem import environment, settings
from stratagem.cluster.addresses import GRPC, probe
from stratagem.cluster.preemption.signals import has_foreign_handler
from stratagem.environment import load
from stratagem.errors import FAILURE, DeadlineExceededError, UnavailableError, explain, invalid
from stratagem.group.authentication.secret import has_ray_token, ray_token_file
from stratagem.launch.prefork.fork_server import HOST_VARIABLE
from stratagem.observe.process_writer import close_events
from stratagem.resources import Closing

# End of a program that has loaded Ray: by Ctrl-C, or after Ray was lost.


class _RayConnection:
    is_lost = False


def is_ray_lost() -> bool:
    """Returns True once a process of Ray that this one depends on was lost."""
    return _RayConnection.is_lost


def mark_ray_lost() -> None:
    """Lets this program end without asking Ray, which would wait for a minute and then abort.

    After an uncaught error it ends without the destructors of Ray's library, too: they may crash.
    """
    _RayConnection.is_lost = True
    ray: Any = sys.modules.get("ray")
    if ray is not None:
        atexit.unregister(ray.shutdown)


@functools.cache
def keep_interrupts() -> None:
    """Lets an interrupted program end by SIGINT, exit code 130. Call before Ray is imported.

    Python notes that a KeyboardInterrupt ended the program, and forgets it if code that runs at the
    exit calls `exec`, as dataclasses do. Ray imports some then, and the exit code would be 1.
    """
    atexit.register(_end)  # handlers run in reverse order: after Ray's


def _end() -> None:
    kind = getattr(sys, "last_type", None)
    if kind is not None and _RayConnection.is_lost:
        _end_now()
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - a constant


def _end_now() -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    close_events(FAILURE)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(FAILURE)


# The smallest that Ray accepts: tensors never go through Ray.
OBJECT_STORE_BYTES = 80 * 2**20
_POLL_S = 0.1


def load_ray() -> Any:
    """Imports Ray and returns it; raises ImportError if it is not installed."""
    is_first, print_error = "ray" not in sys.modules, sys.excepthook
    keep_interrupts()
    ray = load("ray", needed_by="a Ray cluster", install="stratagem[ray]")
    if not is_first:
        return ray
    print_by_ray = sys.excepthook

    def report(*error: Any) -> None:
        # Ray's hook sends an error to the GCS before it prints it, and would not return.
        (print_error if _RayConnection.is_lost else print_by_ray)(*error)

    sys.excepthook = report
    return ray


def quiet_settings() -> dict[str, str]:
    """Returns environment variables that limit Ray's output to its processes' output."""
    return {
        "RAY_DEDUP_LOGS": "0",  # else equal lines of several workers are shown once
        "RAY_FLUSH_DRIVER_LOGS": "1",
        "RAY_SCHEDULER_EVENTS": "0",
        "RAY_COLOR_PREFIX": "1" if sys.stdout.isatty() else "0",
    }


def has_token() -> bool:
    """Returns True if Ray finds a token here, which members of a cluster share."""
    return has_ray_token(environment.snapshot())


class RayCluster(Closing):
    """A connection to Ray, made in the background; an existing one is used, and never closed.

    `address` is host:port; "auto" for the cluster on this machine; None for `RAY_ADDRESS`, or else
    for a new one here, which starts `num_processes` processes early. Raises ValueError for an
    address of Ray Client.

    A Ray started here accepts only clients with its token: `RAY_AUTH_TOKEN`, or else the one in
    `~/.ray/auth_token`, which is made if missing. Messages are not encrypted, not even the keys of
    a cluster; on an untrusted network, Ray needs TLS (`RAY_USE_TLS`).
    """

    def __init__(self, address: str | None = None, *, num_processes: int = 1) -> None:
        self._address = address or environment.lookup("RAY_ADDRESS")
        self._num_processes = num_processes
        if self._address is not None and "://" in self._address:
            raise invalid(
                f"The Ray address {self._address!r} is an address of Ray Client.",
                expected="host:port, from a machine of that cluster: all processes connect to "
                "this one directly.",
                fix="run the program there, with `ray job submit`.",
            )
        self._error: Exception | None = None
        self._is_ready = threading.Event()
        self._is_closed = threading.Event()
        self._is_connected_here = not is_connected()
        self._is_sigterm_own = False
        self.started_here = self._is_connected_here and self._address is None
        if not self._is_connected_here:
            self._is_ready.set()
            return
        environment.set_defaults(quiet_settings())
        if self.started_here:
            make_token()
        self._is_sigterm_own = not has_foreign_handler(signal.SIGTERM)
        threading.Thread(target=self._connect, name="ray connection", daemon=True).start()
        atexit.register(self.close)

    def wait(self) -> None:
        """Waits until this process is connected.

        Raises ImportError without Ray, DeadlineExceededError without a cluster within
        `STRATAGEM_JOIN_TIMEOUT_S`, UnavailableError if the cluster refuses this process.
        """
        self._is_ready.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)  # raised by each call: without earlier frames
        if self._is_sigterm_own and threading.current_thread() is threading.main_thread():
            # Ray's library has set a handler that Python could not restore after a notice.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            self._is_sigterm_own = False

    def close(self) -> None:
        """Closes the connection if it was made here, and stops Ray if it was started here."""
        if self._is_closed.is_set() or not self._is_connected_here:
            return
        self._is_ready.wait()
        if self._error is None and is_connected() and not is_ray_lost():
            load_ray().shutdown(wait_for_processes=True)
        atexit.unregister(self.close)
        self._is_closed.set()

    def _connect(self) -> None:
        try:
            ray = load_ray()
            if self._address not in (None, "auto"):
                wait_for_head(str(self._address), "this process")
            options: dict[str, Any] = {"address": self._address}
            if self.started_here:
                options = {
                    "address": "local",
                    "include_dashboard": False,
                    "num_cpus": max(1, self._num_processes),
                    "object_store_memory": OBJECT_STORE_BYTES,
                }
            ray.init(logging_level="error", **options)
        except (ImportError, DeadlineExceededError, ValueError) as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - raised by wait()
            self._error = self._explained(error)
        self._is_ready.set()
        if self.started_here and self._error is None:
            self._is_closed.wait()

    def _explained(self, error: Exception) -> UnavailableError:
        where = "on this machine" if self.started_here else f"at {self._address}"
        explained = UnavailableError(
            explain(
                f"Cannot connect to Ray {where}: {error!r}",
                expected="a running Ray cluster that accepts this process.",
                fix="check `ray status`; if the cluster has a token, set RAY_AUTH_MODE=token and "
                "the same RAY_AUTH_TOKEN everywhere.",
                code="SG513",
            )
        )
        explained.__cause__ = error
        return explained


def make_token() -> None:
    """Makes the token that a new Ray requires, unless there is one or the user disabled it."""
    if environment.lookup("RAY_AUTH_MODE") == "disabled" or has_token():
        return
    token = secrets.token_hex(32)
    path = ray_token_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ray itself would make it readable for all users.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError:  # the home folder is not writable
        environment.set_defaults({"RAY_AUTH_TOKEN": token})
        return
    with contextlib.closing(os.fdopen(descriptor, "w")) as file:
        file.write(token)


def own_host() -> str:
    """Returns the address at which other machines of the Ray cluster reach this one."""
    if (host := environment.lookup(HOST_VARIABLE)) is not None:  # set by Ray's actor
        return host
    found = load("ray.util", needed_by="a process of a cluster", install="stratagem[ray]")
    return str(found.get_node_ip_address())


def is_connected() -> bool:
    """Returns True if this process is connected to Ray, by any code."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def wait_for_head(address: str, name: str) -> None:
    """Waits until the head of a Ray cluster listens at host:port; `name` is the waiting task.

    Raises DeadlineExceededError after `STRATAGEM_JOIN_TIMEOUT_S`, ValueError for an invalid
    address.
    """
    limit_s = float(settings.read("join_timeout_s"))
    deadline_s = time.monotonic() + limit_s
    while (answer := probe(address)) != "there":
        if time.monotonic() > deadline_s:
            raise DeadlineExceededError(
                explain(
                    f"{name} waited {limit_s:g} s for the head of the Ray cluster at {address}: "
                    f"{answer}.",
                    expected="a leader that has started the head.",
                    fix="check the leader's output and its address in TF_CONFIG; "
                    "STRATAGEM_JOIN_TIMEOUT_S changes the limit.",
                )
            )
        threading.Event().wait(_POLL_S)


# Services of Ray, as seen from outside: whether they answer, not only whether they listen.
#
# A process that was stopped still accepts connections, because the kernel does.

# A service that refuses connections this long has ended; a slow one refuses none.
_REFUSED_S = 3.0


class Service:
    """Answers of a service to greetings, for a look each second.

    `has_started` is False for one that may still start, within `STRATAGEM_JOIN_TIMEOUT_S`. One that
    refuses connections for `refused_s` has ended, 3 s if None.
    """

    def __init__(
        self,
        name: str,
        address: str,
        greeting: bytes = GRPC,
        *,
        has_started: bool = True,
        refused_s: float | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.answer = ""
        self._greeting = greeting
        self._has_started = has_started
        self._refused_s = _REFUSED_S if refused_s is None else refused_s
        self._silent_since_s: float | None = None
        self._refused_since_s: float | None = None

    def look(self) -> None:
        """Greets it once."""
        self.answer = answer = probe(self.address, self._greeting)
        now_s = time.monotonic()
        self._has_started = self._has_started or answer == "there"
        self._silent_since_s = None if answer == "there" else self._silent_since_s or now_s
        self._refused_since_s = (self._refused_since_s or now_s) if answer == "refused" else None

    @property
    def has_ended(self) -> bool:
        """True if it has refused connections for a while."""
        return self._has_started and _is_longer(self._refused_since_s, self._refused_s)

    @property
    def is_lost(self) -> bool:
        """True if it has ended, or has not answered within `STRATAGEM_PEER_TIMEOUT_S`."""
        limit_s = float(settings.read("peer_timeout_s" if self._has_started else "join_timeout_s"))
        return self.has_ended or _is_longer(self._silent_since_s, limit_s)


def _is_longer(since_s: float | None, limit_s: float) -> bool:
    return since_s is not None and time.monotonic() - since_s > limit_s


# Watch over the Ray processes that this process depends on: the head's GCS and its own raylet.
#
# Ray waits for a lost raylet without end, and ends a process without an explanation a minute after
# it lost the GCS.

_WATCH_POLL_S = 1.0


class RayWatch(Closing):
    """Calls `on_lost` once, in its own thread, if one of `addresses` does not answer in time.

    They are by the name of the Ray process. It is lost if it gives no answer for
    `STRATAGEM_PEER_TIMEOUT_S`, or if its port refuses connections for half of that: it has ended
    then, but may be restarted. So it is noticed before the servers that ended with it.
    """

    def __init__(
        self, addresses: Mapping[str, str], on_lost: Callable[[UnavailableError], None]
    ) -> None:
        self._limit_s = float(settings.read("peer_timeout_s"))
        self._services = [
            Service(name, address, refused_s=self._limit_s / 2)
            for name, address in addresses.items()
        ]
        self._on_lost = on_lost
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stratagem-ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(_WATCH_POLL_S):
            for service in self._services:
                service.look()
                if service.is_lost and not self._is_closed.is_set():
                    mark_ray_lost()
                    self._on_lost(self._error(service))
                    return

    def _error(self, service: Service) -> UnavailableError:
        limit_s = self._limit_s / 2 if service.has_ended else self._limit_s
        return UnavailableError(
            explain(
                f"Ray's {service.name} at {service.address} has not answered for {limit_s:g} s: "
                f"{service.answer}. It was killed, or its machine or network failed.",
                expected=f"an answer within {self._limit_s:g} s (STRATAGEM_PEER_TIMEOUT_S), or "
                "half of that from a port that refuses connections.",
                fix="start the Ray cluster again, then the program: it resumes from its last "
                "checkpoint (sg.BackupAndRestore, sg.CheckpointManager).",
                code="SG514",
            )
        )


def watched_addresses() -> dict[str, str]:
    """Returns the addresses of the GCS and of this machine's raylet; call it while both live."""
    ray = load_ray()
    context: Any = ray.get_runtime_context()
    found = {"GCS": context.gcs_address}
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            found["raylet"] = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return found


# Registry of parameter servers, shared by workers that run separate programs: a Ray actor.
#
# Ray imports this module in the actor's process, so nothing here loads JAX.


ACTOR = "stratagem servers"
NAMESPACE = "stratagem"


class ServerRegistry:
    """Addresses of the servers, the workers that use them, and the progress of the leader.

    `keys` are the cluster's, pickled. A lost server keeps its last address.
    """

    def __init__(self, keys: bytes, addresses: list[str]) -> None:
        self._keys = keys
        self._addresses = addresses
        self._present: dict[int, str] = {}  # node of each worker
        self._num_begun = 0

    def enter(self, worker: int, node: str) -> tuple[bytes, list[str]]:
        """Adds a worker by its id, with the id of its machine; returns keys and addresses."""
        self._present[worker] = node
        return self._keys, self._addresses

    def leave(self, worker: int) -> None:
        """Removes a worker that has finished."""
        self._present.pop(worker, None)

    def present(self) -> dict[int, str]:
        """Returns the workers that have not finished, with the node of each."""
        return self._present

    def begin(self, number: int) -> None:
        """Records that the leader has initialized the variables of a training, from 1."""
        self._num_begun = max(self._num_begun, number)

    def num_begun(self) -> int:
        """Returns the number of trainings that the leader has begun."""
        return self._num_begun

    def move(self, server: int, address: str) -> None:
        """Records the new address of a server."""
        self._addresses[server] = address

    def address_of(self, server: int) -> str:
        """Returns the address of a server."""
        return self._addresses[server]

    def __repr__(self) -> str:
        return "server registry"

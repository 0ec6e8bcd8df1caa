"""The connection of this process to Ray, which it starts where there is none.

Ray's processes on a machine are tied to the thread that has started them, so that thread waits for
their end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import split_address
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.prefork.served_process import HOST_VARIABLE
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.servers.closing import Closing

__all__ = [
    "OBJECT_STORE_BYTES",
    "RayCluster",
    "dashboard_url",
    "has_token",
    "is_connected",
    "knock",
    "load_ray",
    "make_token",
    "own_host",
    "quiet_settings",
    "read_token",
    "start_local_ray",
    "wait_for_answer",
]

# Tensors never go through Ray. It takes no less.
OBJECT_STORE_BYTES = 80 * 2**20
_KNOCK_S = 1.0
_POLL_S = 0.1


def load_ray() -> Any:
    """Returns Ray.

    Raises:
        ImportError: it is not installed.
    """
    return load("ray", needed_by="a cluster of parameter servers", install="stratagem[ray]")


def quiet_settings() -> dict[str, str]:
    """Returns variables of the environment, without which Ray prints more than its processes do."""
    return {
        "RAY_DEDUP_LOGS": "0",  # else a line of one worker stands for those of the others
        "RAY_FLUSH_DRIVER_LOGS": "1",
        "RAY_SCHEDULER_EVENTS": "0",
        "RAY_COLOR_PREFIX": "1" if sys.stdout.isatty() else "0",
    }


def has_token() -> bool:
    """Returns whether Ray finds a token here, by which the members of a cluster know each other."""
    named = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(map(environment.lookup, named)) or _token_path().exists()


def read_token() -> str:
    """Returns the token by which the members of a cluster, and its clients, know each other.

    Returns:
        The text; "" where there is none.
    """
    token = environment.lookup("RAY_AUTH_TOKEN")
    if token is not None:
        return token
    path = environment.lookup("RAY_AUTH_TOKEN_PATH")
    file = _token_path() if path is None else Path(path)
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


class RayCluster(Closing):
    """A connection to Ray, made in a thread of its own, so that other work goes on meanwhile.

    Where this process is connected already, that connection is used, and never closed.

    Args:
        address: of a Ray cluster, host:port; "auto" for the one on this machine; None for that in
            `RAY_ADDRESS`, or a new one on this machine.
        num_processes: how many are going to be started; a new Ray begins with them early.

    Raises:
        ValueError: the address is one of Ray Client.
    """

    def __init__(self, address: str | None = None, *, num_processes: int = 1) -> None:
        self._address = address or environment.lookup("RAY_ADDRESS")
        self._num_processes = num_processes
        if self._address is not None and "://" in self._address:
            raise ValueError(
                explain(
                    f"The address of the Ray cluster is {self._address!r}, one of Ray Client.",
                    expected="host:port, from a machine of that cluster: all processes talk to "
                    "this one directly.",
                    fix="run the program there, by `ray job submit`.",
                )
            )
        self._error: Exception | None = None
        self._is_ready = threading.Event()
        self._is_closed = threading.Event()
        self._is_connected_here = not is_connected()
        self.started_here = self._is_connected_here and self._address is None
        if not self._is_connected_here:
            self._is_ready.set()
            return
        environment.set_defaults(quiet_settings())
        if self.started_here:
            make_token()
        threading.Thread(target=self._connect, name="ray connection", daemon=True).start()
        atexit.register(self.close)

    def wait(self) -> None:
        """Waits until this process is connected.

        Raises:
            ImportError: Ray is not installed.
            DeadlineExceededError: there is no such cluster within `STRATAGEM_JOIN_TIMEOUT_S`.
        UnavailableError: it does not let this process in.
        """
        self._is_ready.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the connection if it was made here, and Ray itself if it was started here."""
        if self._is_closed.is_set() or not self._is_connected_here:
            return
        self._is_ready.wait()
        if self._error is None and is_connected():
            load_ray().shutdown(wait_for_processes=True)
        atexit.unregister(self.close)
        self._is_closed.set()

    def _connect(self) -> None:
        try:
            ray = load_ray()
            if self._address not in (None, "auto"):
                wait_for_answer(str(self._address), "this process")
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
        except Exception as error:  # noqa: BLE001 - told by wait()
            self._error = self._explained(error)
        self._is_ready.set()
        if self.started_here and self._error is None:
            self._is_closed.wait()

    def _explained(self, error: Exception) -> UnavailableError:
        where = "on this machine" if self.started_here else f"at {self._address}"
        explained = UnavailableError(
            explain(
                f"There is no connection to Ray {where}: {error!r}",
                expected="a Ray cluster that runs and lets this process in.",
                fix="look at `ray status`; where the cluster has a token, RAY_AUTH_MODE is token "
                "and RAY_AUTH_TOKEN the same everywhere.",
            )
        )
        explained.__cause__ = error
        return explained


def make_token() -> None:
    """Makes the token that a new Ray asks for, unless there is one or the user wants none."""
    if environment.lookup("RAY_AUTH_MODE") == "disabled" or has_token():
        return
    token = secrets.token_hex(32)
    path = _token_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ray would make it itself, for everybody to read.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError:  # a home that cannot be written
        environment.set_defaults({"RAY_AUTH_TOKEN": token})
        return
    with contextlib.closing(os.fdopen(descriptor, "w")) as file:
        file.write(token)


def own_host() -> str:
    """Returns the address of this machine, by which the others of its Ray cluster reach it."""
    if (told := environment.lookup(HOST_VARIABLE)) is not None:  # by the process that Ray started
        return told
    found = load("ray.util", needed_by="a process of a cluster", install="stratagem[ray]")
    return str(found.get_node_ip_address())


def dashboard_url() -> str:
    """Returns where the head of the cluster in `RAY_ADDRESS` takes jobs; connects to it."""
    ray = load_ray()
    context = ray.init(logging_level="error", log_to_driver=False, ignore_reinit_error=True)
    return f"http://{context.dashboard_url}"


def start_local_ray(address: str | None = None, *, num_processes: int = 1) -> RayCluster:
    """Connects to Ray; starts it on this machine where neither an address nor one is there.

    A Ray that is started here lets in only who has its token: `RAY_AUTH_TOKEN`, or else that of
    `~/.ray/auth_token`, which is made where there is none. What is sent is not encrypted, the keys
    of a cluster included; on a network that others listen to, Ray needs TLS (`RAY_USE_TLS`).

    Args:
        address: of a Ray cluster, host:port; "auto" for the one on this machine; None for that in
            `RAY_ADDRESS`, or a new one on this machine.
        num_processes: how many are going to be started.

    Returns:
        The connection; `wait()` waits for it.
    """
    return RayCluster(address, num_processes=num_processes)


def is_connected() -> bool:
    """Returns whether this process is connected to Ray, by whatever has done so."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def knock(address: str) -> str:
    """Returns whether somebody listens at an address.

    Args:
        address: host:port.

    Returns:
        "there", "refused", or why it is not known.
    """
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=_KNOCK_S).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return str(error)
    return "there"


def wait_for_answer(address: str, who: str, limit_s: float | None = None) -> None:
    """Waits until somebody listens at the address of a Ray cluster.

    Args:
        address: host:port.
        who: waits.
        limit_s: how long; None for `STRATAGEM_JOIN_TIMEOUT_S`.

    Raises:
        DeadlineExceededError: nobody did in time.
        ValueError: no such address.
    """
    if limit_s is None:
        limit_s = float(environment.read("join_timeout_s"))
    deadline_s = time.monotonic() + limit_s
    while (answer := knock(address)) != "there":
        if time.monotonic() > deadline_s:
            raise DeadlineExceededError(
                explain(
                    f"{who} has waited {limit_s:g} s for the head of the Ray cluster at "
                    f"{address}: {answer}.",
                    expected="a leader that has started its part.",
                    fix="look at what the leader prints, and whether its address in TF_CONFIG is "
                    "right; STRATAGEM_JOIN_TIMEOUT_S changes the limit.",
                )
            )
        threading.Event().wait(_POLL_S)


def _token_path() -> Path:
    return Path.home() / ".ray" / "auth_token"

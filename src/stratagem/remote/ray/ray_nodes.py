"""Nodes of a Ray cluster formed by the tasks of `TF_CONFIG`: the leader's head, and the others.

The machine of each task has a resource named after the task, so that Ray starts each process on its
machine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from stratagem import environment
from stratagem.closing import Closing
from stratagem.cluster.addresses import split_address
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.messages import explain
from stratagem.remote.ray.ray_cluster import (
    OBJECT_STORE_BYTES,
    has_token,
    load_ray,
    probe,
    quiet_settings,
    wait_for_head,
)

__all__ = ["RayNode", "expect_token", "join_as_node", "resource_of_task", "start_head"]

_POLL_S = 0.1
_LOOK_AT_HEAD_S = 1.0
# A head that refuses connections this long has ended; a slow one refuses none.
_REFUSED_S = 3.0
_TERMINATION_S = 10.0
_TAIL_BYTES = 3000
_RAY_FOLDER = "/tmp/ray"  # noqa: S108 - Ray's own folder, as Ray names it
# `ray start` prints this once the machine is a node.
_STARTED = b"Ray runtime started."


class RayNode(Closing):
    """Ray on this machine, with options of `ray start`; ends with this process."""

    def __init__(self, options: list[str], head_address: str) -> None:
        self.head_address = head_address
        (port,) = free_ports(1)
        self._raylet_address = f"127.0.0.1:{port}"
        options = [f"--node-manager-port={port}", *options]
        self._command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._is_running = threading.Event()
        # The node is tied to the thread that starts it.
        self._keeper = threading.Thread(target=self._run, name="ray node", daemon=True)
        self._keeper.start()
        self._is_running.wait()
        if self._error is not None:
            raise self._error
        atexit.register(self.close)

    def wait_for_start(self, deadline_s: float) -> bool:
        """Waits until this machine has joined the cluster; returns False if that failed.

        Raises DeadlineExceededError once `time.monotonic()` passes `deadline_s`.
        """
        while _STARTED not in self._printed():
            if not self._keeper.is_alive():
                return False
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(
                    explain(
                        f"Ray did not start on this machine in time: {self.last_lines()}",
                        expected="a node that joins the cluster.",
                        fix="check the logs in /tmp/ray; STRATAGEM_JOIN_TIMEOUT_S changes the "
                        "limit.",
                    )
                )
            self._keeper.join(_POLL_S)
        return True

    def wait(self) -> None:
        """Waits for the head to end, then ends this node; UnavailableError if it fails earlier."""
        head, raylet = _Port(self.head_address), _Port(self._raylet_address)
        reason = ""
        while self._keeper.is_alive() and not reason:
            self._keeper.join(_LOOK_AT_HEAD_S)
            head.look()
            if head.is_lost:
                self._kill()  # an orderly end would ask the head first
                self.close()
                return
            raylet.look()
            # `ray start` continues without a raylet that ended in order, as after its agent's end.
            if raylet.has_ended and _STARTED in self._printed():
                reason = "its raylet has ended"
        reason = reason or self.last_lines()
        self.close()
        if probe(self.head_address) == "there":
            raise UnavailableError(
                explain(
                    f"Ray ended on this machine: {reason}",
                    expected=f"a node that runs as long as the head at {self.head_address}.",
                    fix="check the logs in /tmp/ray, and that the machine has enough memory.",
                )
            )

    def last_lines(self) -> str:
        """Returns the last lines that Ray printed."""
        return self._printed()[-_TAIL_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """Ends the node and all its processes."""
        atexit.unregister(self.close)
        if self._log.closed:
            return
        if self._process is not None and self._keeper.is_alive():
            self._process.send_signal(signal.SIGTERM)
            self._keeper.join(_TERMINATION_S)
        self._kill()
        self._keeper.join()
        self._log.close()

    def _run(self) -> None:
        variables = {
            "PATH": environment.path_with_this_python(),  # jobs run python3
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task has all GPUs of its machine
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                tied_command(self._command),
                env={"RAY_AUTH_MODE": "token", **environment.snapshot(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._error = error
        self._is_running.set()
        if self._process is not None:
            self._process.wait()

    def _kill(self) -> None:
        """Kills the remaining processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _printed(self) -> bytes:
        if self._log.closed:
            return b""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0)


class _Port:
    """Answers of a process to connections, for a look each second."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._silent_since_s: float | None = None
        self._refused_since_s: float | None = None

    def look(self) -> None:
        """Connects once."""
        answer, now_s = probe(self._address), time.monotonic()
        self._silent_since_s = None if answer == "there" else self._silent_since_s or now_s
        self._refused_since_s = (self._refused_since_s or now_s) if answer == "refused" else None

    @property
    def has_ended(self) -> bool:
        """True if it has refused connections for a while."""
        return _is_longer(self._refused_since_s, _REFUSED_S)

    @property
    def is_lost(self) -> bool:
        """True if it has ended, or has not answered within `STRATAGEM_PEER_TIMEOUT_S`."""
        limit_s = float(environment.read("peer_timeout_s"))
        return self.has_ended or _is_longer(self._silent_since_s, limit_s)


def _is_longer(since_s: float | None, limit_s: float) -> bool:
    return since_s is not None and time.monotonic() - since_s > limit_s


def resource_of_task(task_type: str, task_index: int) -> str:
    """Returns the name of the resource that only a task's machine has, such as "ps:0"."""
    return f"{task_type}:{task_index}"


def expect_token() -> None:
    """Configures this process for a cluster with a token; RuntimeError if Ray is imported."""
    if environment.lookup("RAY_AUTH_MODE") is None and "ray" in sys.modules:
        raise RuntimeError(
            explain(
                "Ray was imported before RAY_AUTH_MODE was set, so it ignores the cluster's token.",
                expected="RAY_AUTH_MODE=token before `import ray`.",
                fix="set it for the whole program, or import ray later.",
                code="SG513",
            )
        )
    environment.set_defaults({"RAY_AUTH_MODE": "token", **quiet_settings()})


def start_head(
    address: str,
    *,
    task_type: str = "chief",
    task_index: int = 0,
    jobs_port: int | None = None,
    timeout_s: float | None = None,
) -> RayNode:
    """Starts the head of a Ray cluster on this machine. Connect with `start_local_ray`.

    All tasks need the same token, in `RAY_AUTH_TOKEN` or in the file of `RAY_AUTH_TOKEN_PATH`. On a
    private network, `RAY_AUTH_MODE=disabled` works without one. Ray listens at `address`
    (host:port), for jobs of clients at `jobs_port` if given, and must start within `timeout_s`,
    `STRATAGEM_JOIN_TIMEOUT_S` if None.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: there is no token, or Ray was imported before it was configured.
        UnavailableError: the host is unknown, or Ray does not start.
        DeadlineExceededError: Ray does not start in time.
        ValueError: the address is invalid.
    """
    host, port = split_address(address)
    _require_token()
    expect_token()
    load_ray()
    options = [
        "--head",
        f"--port={port}",
        *_dashboard(jobs_port),
        # Unused, but required; the default port may be in use by another head.
        f"--ray-client-server-port={free_ports(1)[0]}",
        *_options(host, task_type, task_index),
    ]
    deadline_s = time.monotonic() + _limit_s(timeout_s)
    if (lines := _failed_start(node := RayNode(options, address), deadline_s)) is None:
        return node
    raise UnavailableError(
        explain(
            f"The head of the Ray cluster cannot start at {address}: {lines}",
            expected="an address of this machine with a free port, and time to start Ray.",
            fix="correct the address of this task in TF_CONFIG. If Ray timed out, this machine is "
            "overloaded: try again.",
        )
    )


def join_as_node(
    head_address: str,
    task_type: str,
    task_index: int,
    *,
    host: str | None = None,
    timeout_s: float | None = None,
) -> RayNode:
    """Waits for the head of a Ray cluster and joins it with this machine.

    None for `host` means the address from which this machine reaches the head, for `timeout_s`
    `STRATAGEM_JOIN_TIMEOUT_S`. Raises the errors of `start_head`; UnavailableError also if the head
    refuses this machine.
    """
    split_address(head_address)
    _require_token()
    load_ray()
    limit_s = _limit_s(timeout_s)
    deadline_s = time.monotonic() + limit_s
    wait_for_head(head_address, f"{task_type} {task_index}", limit_s)
    options = [
        f"--address={head_address}",
        # A separate folder, as tasks on one machine would use the same names for their sockets.
        f"--temp-dir={_RAY_FOLDER}/{task_type}-{task_index}-{os.getpid()}",
        *_options(host, task_type, task_index),
    ]
    while (lines := _failed_start(node := RayNode(options, head_address), deadline_s)) is not None:
        if time.monotonic() > deadline_s or "token" in lines.lower():
            raise UnavailableError(
                explain(
                    f"{task_type} {task_index} cannot join the Ray cluster at {head_address}: "
                    f"{lines}",
                    expected="a leader that accepts this machine.",
                    fix="give all tasks the same RAY_AUTH_TOKEN and the same version of Ray.",
                    code="SG513",
                )
            )
    return node


def _failed_start(node: RayNode, deadline_s: float) -> str | None:
    """Waits for the start of a node; returns its last lines if it failed, else None."""
    try:
        if node.wait_for_start(deadline_s):
            return None
        lines = node.last_lines()
    except BaseException:
        node.close()
        raise
    node.close()
    return lines


def _dashboard(jobs_port: int | None) -> list[str]:
    """Returns the options of Ray's dashboard, which accepts jobs and requires the token."""
    if jobs_port is None:
        return ["--include-dashboard=false"]
    # All interfaces: a forwarded port arrives at the loopback address.
    return ["--include-dashboard=true", "--dashboard-host=0.0.0.0", f"--dashboard-port={jobs_port}"]


def _options(host: str | None, task_type: str, task_index: int) -> list[str]:
    resources = {resource_of_task(task_type, task_index): 1}
    options = [
        "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",  # several nodes may share a machine
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--resources={json.dumps(resources)}",
    ]
    if host is not None:
        options.append(f"--node-ip-address={_ip_address(host, task_type, task_index)}")
    return options


def _ip_address(host: str, task_type: str, task_index: int) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UnavailableError(
            explain(
                f"The host {host!r} of {task_type} {task_index} is unknown on this machine: "
                f"{error}",
                expected="a name or an IP address that all tasks of the cluster can resolve.",
                fix=f"correct the address of {task_type} {task_index} in TF_CONFIG, or in the "
                "cluster_spec of the resolver.",
            )
        ) from error


def _limit_s(timeout_s: float | None) -> float:
    return float(environment.read("join_timeout_s")) if timeout_s is None else timeout_s


def _require_token() -> None:
    if has_token() or environment.lookup("RAY_AUTH_MODE") == "disabled":
        return
    raise RuntimeError(
        explain(
            "This task has no token for the Ray cluster, and without one any client could run "
            "programs there.",
            expected="the same secret text in RAY_AUTH_TOKEN of all tasks.",
            fix="set it, for example to the output of `openssl rand -hex 32`; or set "
            "RAY_AUTH_MODE=disabled to run without a token.",
            code="SG513",
        )
    )

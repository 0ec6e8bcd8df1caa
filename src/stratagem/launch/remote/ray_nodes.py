"""Nodes of a Ray cluster formed by the tasks of `TF_CONFIG`: the leader's head, and the others.

The machine of each task has a resource named after the task, so that Ray starts each process on its
machine. A node is a process of this one, which starts, watches and ends it. When the head ends, the
others end; when another node ends, the task that runs it fails.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment, settings
from stratagem.cluster.addresses import HTTP, free_ports, ip_address, probe, split_address
from stratagem.cluster.roles import TASK_TYPES, task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError, UnavailableError, explain, invalid
from stratagem.launch.remote.ray_cluster import (
    OBJECT_STORE_BYTES,
    Service,
    has_token,
    load_ray,
    quiet_settings,
    wait_for_head,
)
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing

# Tasks of a cluster, and its leader, at whose address the others join.


def tasks_of(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Returns type and index of every task: chief, workers, parameter servers, evaluator."""
    return [
        (job, index)
        for job in TASK_TYPES
        if task_count(spec, job)
        for index in spec.task_indices(job)
    ]


def leader_of(spec: ClusterSpec) -> tuple[str, int]:
    """Returns the chief, else the first worker, else the first task; ValueError without tasks."""
    tasks = tasks_of(spec)
    if not tasks:
        raise invalid(
            f"The cluster {spec!r} has no tasks.",
            expected="at least one task with its address.",
            fix='pass {"chief": ["host0:2222"], "worker": ["host1:2222"]}, for example.',
        )
    return tasks[0]


def resource_of_task(task_type: str, task_index: int) -> str:
    """Returns the name of the resource that only a task's machine has, such as "ps:0"."""
    return f"{task_type}:{task_index}"


# A node: Ray on this machine.

_POLL_S = 0.1
_LOOK_AT_HEAD_S = 1.0
_TERMINATION_S = 10.0
_TAIL_BYTES = 3000
# `ray start` prints this once the machine is a node.
_STARTED = b"Ray runtime started."
# Environment variable that all processes of a node inherit: the process that started it, and a
# random part.
_NODE_VARIABLE = "STRATAGEM_RAY_NODE"
_WORKER = b"ray::"
_WORKERS_END_S = 2.0


class RayNode(Closing):
    """Ray on this machine, with options of `ray start`; ends with this process.

    `dashboard_port` is that of the dashboard, if this machine runs one.
    """

    def __init__(
        self, options: list[str], head_address: str, *, dashboard_port: int | None = None
    ) -> None:
        self.head_address = head_address
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        _end_orphans()
        (port,) = free_ports(1)
        self._services = [Service("raylet", f"127.0.0.1:{port}")]
        if dashboard_port is not None:
            address = f"127.0.0.1:{dashboard_port}"
            self._services.append(Service("dashboard", address, HTTP, has_started=False))
        options = [f"--node-manager-port={port}", *options]
        variables = {
            "PATH": environment.path_with_this_python(),  # jobs run python3
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task has all GPUs of its machine
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            _NODE_VARIABLE: self._mark,
        }
        with contextlib.ExitStack() as on_error:
            self._log = on_error.enter_context(tempfile.TemporaryFile())
            self._session = Session(
                (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options),
                {"RAY_AUTH_MODE": "token", **environment.snapshot(), **variables},
                stdout=self._log,
                stderr=self._log,
            )
            on_error.pop_all()
        atexit.register(self.close)

    def has_started(self, deadline_s: float) -> bool:
        """Waits until this machine has joined the cluster; returns False if that failed.

        Raises DeadlineExceededError once `time.monotonic()` passes `deadline_s`.
        """
        while _STARTED not in self._printed():
            if self._session.has_ended(_POLL_S):
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
        return True

    def wait(self) -> None:
        """Waits for the head to end, then ends this node; UnavailableError if it fails earlier."""
        head, lost = Service("head", self.head_address), ""
        while not self._session.has_ended(_LOOK_AT_HEAD_S) and not lost:
            head.look()
            if head.is_lost:
                self._session.close()  # an orderly end would ask the head first
                self.close()
                return
            # `ray start` continues without those that ended in order, or were stopped.
            for service in self._services if _STARTED in self._printed() else ():
                service.look()
                if service.is_lost:
                    how = "has ended" if service.has_ended else "does not answer"
                    lost = f"its {service.name} {how}"
        reason = lost or self.last_lines()
        self.close()
        if lost or probe(self.head_address) == "there":
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
        self._session.end(_TERMINATION_S)
        self._session.close()  # Ray's agents may outlive `ray start`
        _end_workers(self._mark)
        self._log.close()

    def _printed(self) -> bytes:
        if self._log.closed:
            return b""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0)


def _end_workers(mark: str) -> None:
    """Kills workers of a node that do not end with its raylet, as after a jump of the clock."""
    deadline_s = time.monotonic() + _WORKERS_END_S
    while mark in _marked_workers().values() and time.monotonic() < deadline_s:
        threading.Event().wait(_POLL_S)
    _kill_workers(lambda its_mark: its_mark == mark)


def _end_orphans() -> None:
    """Kills workers of nodes whose own process was killed; they may outlive it, too."""
    _kill_workers(lambda mark: not Path("/proc", mark.partition("-")[0]).exists())


def _kill_workers(is_left: Callable[[str], bool]) -> None:
    for worker, mark in _marked_workers().items():
        if is_left(mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker, signal.SIGKILL)


def _marked_workers() -> dict[int, str]:
    """Returns the marks of Ray's workers by process id; empty where there is no `/proc`."""
    start, found = f"{_NODE_VARIABLE}=".encode(), dict[int, str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or of another user
            if not (process / "cmdline").read_bytes().startswith(_WORKER):
                continue
            for variable in (process / "environ").read_bytes().split(b"\0"):
                if variable.startswith(start):
                    found[int(process.name)] = variable.removeprefix(start).decode()
    return found


# The head and the nodes that join it.

_RAY_FOLDER = "/tmp/ray"  # noqa: S108 - Ray's own folder, as Ray names it


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
) -> RayNode:
    """Starts the head of a Ray cluster on this machine. Connect with `RayCluster`.

    All tasks need the same token, in `RAY_AUTH_TOKEN` or in the file of `RAY_AUTH_TOKEN_PATH`. On a
    private network, `RAY_AUTH_MODE=disabled` works without one. Ray listens at `address`
    (host:port), for jobs of clients at `jobs_port` if given, and must start within
    `STRATAGEM_JOIN_TIMEOUT_S`.

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
    # The dashboard accepts jobs, and requires the token. It listens on all interfaces: a forwarded
    # port arrives at the loopback address.
    dashboard = ["--include-dashboard=false"]
    if jobs_port is not None:
        dashboard = ["--include-dashboard=true", "--dashboard-host=0.0.0.0"]
        dashboard.append(f"--dashboard-port={jobs_port}")
    options = [
        "--head",
        f"--port={port}",
        *dashboard,
        # Unused, but required; the default port may be in use by another head.
        f"--ray-client-server-port={free_ports(1)[0]}",
        *_options(host, task_type, task_index),
    ]
    deadline_s = time.monotonic() + settings.read("join_timeout_s")
    node = RayNode(options, address, dashboard_port=jobs_port)
    if (lines := _failed_start(node, deadline_s)) is None:
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
    head_address: str, task_type: str, task_index: int, *, host: str | None = None
) -> RayNode:
    """Waits for the head of a Ray cluster and joins it with this machine.

    None for `host` means the address from which this machine reaches the head. Raises the errors
    of `start_head`; UnavailableError also if the head refuses this machine.
    """
    split_address(head_address)
    _require_token()
    load_ray()
    deadline_s = time.monotonic() + settings.read("join_timeout_s")
    wait_for_head(head_address, f"{task_type} {task_index}")
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
    with contextlib.ExitStack() as failing:
        failing.callback(node.close)
        if not node.has_started(deadline_s):
            return node.last_lines()
        failing.pop_all()
    return None


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
        return ip_address(host)
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


# Program in a session of its own, of whose processes none outlives this one.


class Session(Closing):
    """Runs a program that ends with this process, and with it the processes that it starts.

    `variables` are its environment, `streams` its "stdout" and "stderr" as for `subprocess.Popen`.
    Raises OSError if the system cannot start another process.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], **streams: Any
    ) -> None:
        self._guardian = Guardian()
        self._closing = threading.Lock()
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def keep() -> None:
            # The kernel ties a program to the thread that starts it.
            try:
                process = subprocess.Popen(  # noqa: S603 - our own command, or the user's
                    tied_command(command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                    **streams,
                )
            except OSError as error:
                made.put(error)
                return
            made.put(process)
            process.wait()

        threading.Thread(target=keep, name=f"session of {command[0]}", daemon=True).start()
        started = made.get()
        if isinstance(started, OSError):
            self._guardian.close()
            raise started
        self.process: subprocess.Popen[bytes] = started
        self._guardian.watch(started.pid)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Waits for the end of the program; returns False after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float) -> None:
        """Sends SIGTERM to the program, and SIGKILL after `grace_s`."""
        self.process.send_signal(signal.SIGTERM)
        if not self.has_ended(grace_s):
            self.process.kill()

    def close(self) -> None:
        """Kills what is left of the session."""
        with self._closing:  # whoever reads its output also closes it at its end
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._guardian.close()

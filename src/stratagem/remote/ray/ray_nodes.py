"""A Ray cluster made by the tasks of `TF_CONFIG`: the leader is its head, all others join it.

The machine of each task has a resource that is named after the task, so that each process is
started on the machine that is meant for it.
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
from stratagem.cluster.addresses import split_address
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.messages import explain
from stratagem.remote.ray.ray_cluster import (
    OBJECT_STORE_BYTES,
    has_token,
    knock,
    load_ray,
    quiet_settings,
    wait_for_answer,
)
from stratagem.servers.closing import Closing

__all__ = ["RayNode", "expect_token", "join_as_node", "resource_of_task", "start_head"]

_POLL_S = 0.1
_LOOK_AT_HEAD_S = 1.0
# A head that refuses connections for so long has ended; one that is only slow refuses none.
_REFUSED_S = 3.0
_TERMINATION_S = 10.0
_TAIL_BYTES = 3000
_RAY_FOLDER = "/tmp/ray"
# What `ray start` prints when the machine is a node.
_STARTED = b"Ray runtime started."


class RayNode(Closing):
    """The part of a Ray cluster that runs on this machine, as long as this process lives.

    Args:
        options: of `ray start`.
        head_address: of the cluster, host:port.
    """

    def __init__(self, options: list[str], head_address: str) -> None:
        self.head_address = head_address
        self._command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._is_running = threading.Event()
        # It is tied to the thread that starts it.
        self._keeper = threading.Thread(target=self._run, name="ray node", daemon=True)
        self._keeper.start()
        self._is_running.wait()
        if self._error is not None:
            raise self._error
        atexit.register(self.close)

    def wait_for_start(self, deadline_s: float) -> bool:
        """Waits until this machine belongs to the cluster.

        Args:
            deadline_s: of `time.monotonic()`.

        Returns:
            False where that has failed.

        Raises:
            DeadlineExceededError: neither is known in time.
        """
        while _STARTED not in self._printed():
            if not self._keeper.is_alive():
                return False
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(
                    explain(
                        f"Ray has not started on this machine in time: {self.last_lines()}",
                        expected="a node of the cluster.",
                        fix="look at the logs in /tmp/ray; STRATAGEM_JOIN_TIMEOUT_S changes the "
                        "limit.",
                    )
                )
            self._keeper.join(_POLL_S)
        return True

    def wait(self) -> None:
        """Waits until the head has ended, and ends this node then.

        Raises:
            UnavailableError: this node has failed while the head goes on.
        """
        refused_since_s: float | None = None
        lost_since_s: float | None = None
        while self._keeper.is_alive():
            self._keeper.join(_LOOK_AT_HEAD_S)
            answer = knock(self.head_address)
            now_s = time.monotonic()
            refused_since_s = (refused_since_s or now_s) if answer == "refused" else None
            lost_since_s = None if answer == "there" else (lost_since_s or now_s)
            is_refused = refused_since_s is not None and now_s - refused_since_s > _REFUSED_S
            limit_s = float(environment.read("peer_timeout_s"))
            if is_refused or (lost_since_s is not None and now_s - lost_since_s > limit_s):
                self._kill()  # what ends in order asks the head first
                self.close()
                return
        lines = self.last_lines()
        self.close()
        if knock(self.head_address) == "there":
            raise UnavailableError(
                explain(
                    f"Ray has ended on this machine: {lines}",
                    expected=f"a node that runs as long as the head at {self.head_address}.",
                    fix="look at the logs in /tmp/ray, and whether the machine has the memory.",
                )
            )

    def last_lines(self) -> str:
        """Returns the end of what it has printed."""
        return self._printed()[-_TAIL_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """Ends the node, with all its processes."""
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
            "PATH": environment.path_with_this_python(),  # jobs say python3
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task has all GPUs of its machine
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        try:
            self._process = subprocess.Popen(
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
        """Kills all that is left of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _printed(self) -> bytes:
        if self._log.closed:
            return b""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0)


def resource_of_task(task_type: str, task_index: int) -> str:
    """Returns the name of the resource that only the machine of a task has.

    Args:
        task_type: of `TF_CONFIG`.
        task_index: its place among those.

    Returns:
        Such as "ps:0".
    """
    return f"{task_type}:{task_index}"


def expect_token() -> None:
    """Notes, before Ray is loaded here, that the cluster of this process has a token.

    Raises:
        RuntimeError: Ray was loaded too early to know of it.
    """
    if environment.lookup("RAY_AUTH_MODE") is None and "ray" in sys.modules:
        raise RuntimeError(
            explain(
                "Ray was loaded before this process was told that its cluster has a token.",
                expected="RAY_AUTH_MODE=token before `import ray`.",
                fix="set it for the whole program, or do not import ray before this.",
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
    """Starts a Ray cluster on this machine, which others join. Connect by `start_local_ray`.

    All tasks need the same token in `RAY_AUTH_TOKEN`, or in a file that `RAY_AUTH_TOKEN_PATH`
    names; `RAY_AUTH_MODE=disabled` does without, where nobody else reaches this network.

    Args:
        address: of this task, host:port; Ray listens there.
        task_type: of this task.
        task_index: of this task.
        jobs_port: where it takes jobs of clients that are no members; None for none.
        timeout_s: how long to wait for the start; None for `STRATAGEM_JOIN_TIMEOUT_S`.

    Returns:
        The node, to be closed when all is over.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: there is no token, or Ray was loaded too early to know of it.
        UnavailableError: the host is unknown, or Ray does not start here.
        DeadlineExceededError: it does not in time.
        ValueError: no such address.
    """
    host, port = split_address(address)
    _require_token()
    expect_token()
    load_ray()
    options = [
        "--head",
        f"--port={port}",
        *_dashboard(jobs_port),
        # Nobody uses it, but it cannot be left out, and its own port may be another head's.
        f"--ray-client-server-port={free_ports(1)[0]}",
        *_options(host, task_type, task_index),
    ]
    deadline_s = time.monotonic() + _limit_s(timeout_s)
    if (lines := _failed_start(node := RayNode(options, address), deadline_s)) is None:
        return node
    raise UnavailableError(
        explain(
            f"The head of the Ray cluster does not start at {address}: {lines}",
            expected="an address of this machine with a port that is free.",
            fix="correct the address of this task in TF_CONFIG.",
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
    """Lets this machine join the cluster of `start_head`, waiting for it to be there.

    Args:
        head_address: that of the leader, host:port.
        task_type: of this task.
        task_index: of this task.
        host: the address of this machine; None for the one by which it reaches the head.
        timeout_s: how long to wait; None for `STRATAGEM_JOIN_TIMEOUT_S`.

    Returns:
        The node; `wait()` waits for the end of the cluster.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: there is no token.
        UnavailableError: the host is unknown, or the head does not let this machine in.
        DeadlineExceededError: the head is not there in time.
        ValueError: no such address.
    """
    split_address(head_address)
    _require_token()
    load_ray()
    limit_s = _limit_s(timeout_s)
    deadline_s = time.monotonic() + limit_s
    wait_for_answer(head_address, resource_of_task(task_type, task_index), limit_s)
    options = [
        f"--address={head_address}",
        # Of its own: tasks that share a machine would take the same names for their sockets.
        f"--temp-dir={_RAY_FOLDER}/{task_type}-{task_index}-{os.getpid()}",
        *_options(host, task_type, task_index),
    ]
    while (lines := _failed_start(node := RayNode(options, head_address), deadline_s)) is not None:
        if time.monotonic() > deadline_s or "token" in lines.lower():
            raise UnavailableError(
                explain(
                    f"{task_type} {task_index} cannot join the Ray cluster at {head_address}: "
                    f"{lines}",
                    expected="a leader that lets this machine in.",
                    fix="give all tasks the same RAY_AUTH_TOKEN, and the same version of Ray.",
                )
            )
    return node


def _failed_start(node: RayNode, deadline_s: float) -> str | None:
    """Waits for the start of a node; returns what one has printed that could not start."""
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
    """Jobs are taken by Ray's dashboard, which asks for the token as all of the cluster does."""
    if jobs_port is None:
        return ["--include-dashboard=false"]
    # Whoever comes through a forwarded port comes to this machine's own name for itself.
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
                expected="a name or an IP address by which the tasks of the cluster find it.",
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
            "This task has no token of the Ray cluster: whoever reaches a cluster without one runs "
            "programs there.",
            expected="the same secret text in RAY_AUTH_TOKEN of all tasks.",
            fix="set it, for example to what `openssl rand -hex 32` prints; "
            "RAY_AUTH_MODE=disabled does without.",
        )
    )

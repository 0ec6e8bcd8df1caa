"""A node of a Ray cluster as a process of this one: started, watched and ended."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from stratagem import environment, settings
from stratagem.cluster.addresses import GRPC, HTTP, free_ports, probe
from stratagem.errors import DeadlineExceededError, UnavailableError, explain
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing

# Services of Ray, as seen from outside: whether they answer, not only whether they listen.
#
# A process that was stopped still accepts connections, because the kernel does.

# A service that refuses connections this long has ended; a slow one refuses none.
_REFUSED_S = 3.0


class Service:
    """Answers of a service to greetings, for a look each second.

    `has_started` is False for one that may still start, within `STRATAGEM_JOIN_TIMEOUT_S`.
    """

    def __init__(
        self, name: str, address: str, greeting: bytes = GRPC, *, has_started: bool = True
    ) -> None:
        self.name = name
        self.address = address
        self._greeting = greeting
        self._has_started = has_started
        self._silent_since_s: float | None = None
        self._refused_since_s: float | None = None

    def look(self) -> None:
        """Greets it once."""
        answer, now_s = probe(self.address, self._greeting), time.monotonic()
        self._has_started = self._has_started or answer == "there"
        self._silent_since_s = None if answer == "there" else self._silent_since_s or now_s
        self._refused_since_s = (self._refused_since_s or now_s) if answer == "refused" else None

    @property
    def has_ended(self) -> bool:
        """True if it has refused connections for a while."""
        return self._has_started and _is_longer(self._refused_since_s, _REFUSED_S)

    @property
    def is_lost(self) -> bool:
        """True if it has ended, or has not answered within `STRATAGEM_PEER_TIMEOUT_S`."""
        limit_s = float(settings.read("peer_timeout_s" if self._has_started else "join_timeout_s"))
        return self.has_ended or _is_longer(self._silent_since_s, limit_s)


def _is_longer(since_s: float | None, limit_s: float) -> bool:
    return since_s is not None and time.monotonic() - since_s > limit_s


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
        head, lost = Service("head", self.head_address), ""
        while self._keeper.is_alive() and not lost:
            self._keeper.join(_LOOK_AT_HEAD_S)
            head.look()
            if head.is_lost:
                self._kill()  # an orderly end would ask the head first
                self.close()
                return
            if _STARTED in self._printed():
                lost = self._lost_service()
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

    def _lost_service(self) -> str:
        """Looks at the services; returns what happened to one, or "".

        `ray start` continues without those that ended in order, or were stopped.
        """
        for service in self._services:
            service.look()
            if service.is_lost:
                what = "has ended" if service.has_ended else "does not answer"
                return f"its {service.name} {what}"
        return ""

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
        _end_workers(self._mark)
        self._log.close()

    def _run(self) -> None:
        variables = {
            "PATH": environment.path_with_this_python(),  # jobs run python3
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task has all GPUs of its machine
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            _NODE_VARIABLE: self._mark,
        }
        with Guardian() as guardian:
            try:
                self._process = process = subprocess.Popen(  # noqa: S603 - our own command
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
                return
            # Ray's agents may outlive `ray start`, which is tied to this process.
            guardian.watch(process.pid)
            self._is_running.set()
            process.wait()

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


def _end_workers(mark: str) -> None:
    """Kills workers of a node that do not end with its raylet, as after a jump of the clock."""
    deadline_s = time.monotonic() + _WORKERS_END_S
    while (workers := _workers(mark)) and time.monotonic() < deadline_s:
        threading.Event().wait(_POLL_S)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(worker, signal.SIGKILL)


def _end_orphans() -> None:
    """Kills workers of nodes whose own process was killed; they may outlive it, too."""
    for worker, mark in _marked_workers().items():
        owner = mark.partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker, signal.SIGKILL)


def _workers(mark: str) -> list[int]:
    """Returns the process ids of Ray's workers of a node."""
    return [worker for worker, its_mark in _marked_workers().items() if its_mark == mark]


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

"""Client of a fork server: starts it and forks processes from it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from stratagem import environment, settings
from stratagem.environment import load
from stratagem.errors import UnavailableError, explain
from stratagem.launch.prefork.server_program import CLOSE, MAX_MESSAGE_BYTES, PROGRAM
from stratagem.launch.tasks.exit_status import describe_exit
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing

# A server that was stopped (SIGSTOP) reports no ends. Any other one does it at once.
_UNREPORTED_S = 2.0
_POLL_S = 0.5


class ForkedProcess:
    """A process forked from a fork server, as `subprocess.Popen`. It dies when this process does.

    `address` is where its object serves; empty for a script. `stdout` and `stderr` are read ends of
    pipes, if whoever forked it has made some.
    """

    def __init__(
        self, server: ForkServer, number: int, reply: dict[str, Any], channel: socket.socket
    ) -> None:
        self.pid: int = reply["process_id"]
        self.address: str = reply.get("address", "")
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._server = server
        self._number = number
        self._channel = channel
        self._ended_s: float | None = None

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            code = self._server.exit_code(self._number, timeout_s=timeout_s)
            self.returncode = self._unreported_code() if code is None else code
            if self.returncode is not None:
                self._channel.close()
        return self.returncode

    def wait(self) -> int:
        """Waits for its end and returns the exit code, negative for a signal."""
        while (code := self.poll(_POLL_S)) is None:
            pass
        return code

    def _unreported_code(self) -> int | None:
        """Returns the exit code that the server has not reported for a while."""
        with contextlib.suppress(OSError):
            # Fields 3 and 52 of proc(5); the name before them may contain anything.
            text = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
            fields, now_s = text.rpartition(")")[2].split(), time.monotonic()
            if fields[0] == "Z":
                self._ended_s = now_s if self._ended_s is None else self._ended_s
                if now_s > self._ended_s + _UNREPORTED_S:
                    return os.waitstatus_to_exitcode(int(fields[49]))
        return None

    def kill(self) -> None:
        """Sends SIGKILL."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def ask_to_close(self) -> None:
        """Asks it to close its object and exit, without waiting."""
        with contextlib.suppress(OSError):  # already gone
            self._channel.sendall(CLOSE)

    def close(self) -> None:
        """Asks it to close its object and waits for its exit."""
        self.ask_to_close()
        self.wait()


class ForkServer:
    """A process that imports modules once; others are forked from it. Thread-safe.

    `variables` are its whole environment. It imports from this process's `sys.path` if
    `inherits_path`, otherwise from a new interpreter's. `is_silent` discards its output while it
    imports.
    """

    def __init__(
        self,
        modules: Sequence[str],
        variables: dict[str, str],
        *,
        inherits_path: bool = True,
        is_silent: bool = False,
    ) -> None:
        self._changed = threading.Condition()
        self._is_loaded = False
        self.is_over = False  # once the server and all its forks have ended
        self._trace = ""
        self._numbers = itertools.count()
        self._exit_codes: dict[int, int] = {}  # by fork number
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"path": sys.path if inherits_path else None, "modules": list(modules)}
        command = (sys.executable, "-c", PROGRAM, str(theirs.fileno()), json.dumps(options))
        # The kernel kills the server when the thread that started it exits.
        self._keeper = threading.Thread(
            target=self._keep,
            args=(command, variables, theirs, subprocess.DEVNULL if is_silent else None),
            name="fork server",
            daemon=True,
        )
        self._keeper.start()

    @property
    def is_ready(self) -> bool:
        """True if it has imported its modules and runs."""
        return self._is_loaded and not self.is_over

    def wait_until_loaded(self, timeout_s: float | None = None) -> bool:
        """Waits until the modules are imported or the server is over; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_loaded or self.is_over, timeout_s)

    def fork(
        self,
        kind: Literal["object", "script"],
        job: bytes,
        outputs: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
    ) -> ForkedProcess:
        """Forks a process once the modules are imported, and waits for its first reply.

        `job` is, for an object, a pickled function and its arguments; the function returns an
        object with an `address` and a `close()`. For a script, see `script_job`. `outputs` are
        descriptors for stdout and stderr; empty to share the server's. None for `timeout_s` sets
        no limit. Raises RuntimeError if an import or the function failed, UnavailableError if the
        process died or did not reply in time, or if this server did not: it has
        `STRATAGEM_JOIN_TIMEOUT_S` for its imports and `STRATAGEM_PEER_TIMEOUT_S` for the fork.
        """
        load_s = float(settings.read("join_timeout_s"))
        if not self.wait_until_loaded(load_s):
            raise _too_slow("loaded its modules", load_s, "STRATAGEM_JOIN_TIMEOUT_S")
        _require_no_error(self._trace)
        number = next(self._numbers)
        fork_s = float(settings.read("peer_timeout_s"))
        ours, theirs = socket.socketpair()
        limit_s = fork_s if timeout_s is None else min(timeout_s, fork_s)
        ours.settimeout(limit_s)
        try:
            with theirs, contextlib.suppress(OSError):  # already gone: there will be no reply
                request = json.dumps({"kind": kind, "number": number}).encode()
                socket.send_fds(self._connection, [request], [theirs.fileno(), *outputs])
            try:
                ours.recv(1)  # from the fork; nothing if there is none
            except TimeoutError:
                raise _too_slow("forked a process", limit_s, "STRATAGEM_PEER_TIMEOUT_S") from None
            ours.settimeout(timeout_s)
            reply = _exchange(ours, job)
            _require_no_error(reply.get("trace", ""))
        except BaseException:
            ours.close()
            raise
        return ForkedProcess(self, number, reply, ours)

    def exit_code(self, number: int, *, timeout_s: float | None = None) -> int | None:
        """Waits for a fork's exit code, negative for a signal; None after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._exit_codes or self.is_over, timeout_s)
            return self._exit_codes.get(number, -signal.SIGKILL if self.is_over else None)

    def close(self) -> None:
        """Ends the server and all its forks."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._keeper.join()

    def _keep(
        self,
        command: Sequence[str],
        variables: dict[str, str],
        theirs: socket.socket,
        output: int | None,
    ) -> None:
        """Runs the server and receives its reports until it ends."""
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: S603 - the command that the user gave
                    tied_command(command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
            while report := self._connection.recv(MAX_MESSAGE_BYTES):
                self._receive(json.loads(report))
        except OSError as error:
            self._trace = f"{type(error).__name__}: {error}"
        finally:
            if process is not None:
                process.kill()
                process.wait()
            self._connection.close()
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _receive(self, report: dict[str, Any]) -> None:
        with self._changed:
            if report["kind"] == "loaded":
                self._is_loaded = True
            elif report["kind"] == "failed":
                self._trace = report["trace"]
            else:
                self._exit_codes[report["number"]] = report["code"]
            self._changed.notify_all()


def _too_slow(what: str, limit_s: float, setting: str) -> UnavailableError:
    return UnavailableError(
        explain(
            f"A fork server has not {what} within {limit_s:g} s: it was stopped, or this "
            "machine is overloaded.",
            expected=f"an answer within {setting}.",
            fix="look for stopped processes, and at the load of the machine; the setting "
            "changes the limit.",
        )
    )


def _require_no_error(trace: str) -> None:
    if trace:
        raise RuntimeError(
            explain(
                f"A forked process cannot start: {trace}",
                expected="modules that can be imported and a function that succeeds.",
                fix="read the end of the traceback above; it comes from the forked process.",
            )
        )


def _exchange(channel: socket.socket, job: bytes) -> dict[str, Any]:
    """Sends a fork its job and returns the reply."""
    reply = b""
    with contextlib.suppress(OSError), channel.makefile("rwb") as file:  # broken: no reply
        file.write(b"%d\n" % len(job))
        file.write(job)
        file.flush()
        reply = file.readline()
    if not reply:
        raise UnavailableError(
            explain(
                "A forked process died before it replied.",
                expected="a process that starts and keeps running.",
                fix="read its last output, and check that the machine has enough memory.",
            )
        )
    return json.loads(reply)


class SharedStandby(Closing):
    """Process to fork others from, replaced when it dies; see `ForkServer`.

    It imports `modules`. `variables` are its environment, which forked processes inherit.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules, self._variables = modules, dict(variables)
        self._replacing = threading.Lock()
        self._server = ForkServer(modules, self._variables)
        self._is_closed = False

    def start(self, pickled: bytes, outputs: Sequence[int] = ()) -> ForkedProcess:
        """Forks a process that serves an object; see `ForkServer.fork`."""
        with self._replacing:
            if self._server.is_over and not self._is_closed:
                self._server = ForkServer(self._modules, self._variables)
            server = self._server
        return server.fork("object", pickled, outputs)

    def close(self) -> None:
        """Stops this process and those forked from it."""
        with self._replacing:
            self._is_closed = True
        self._server.close()


# Ray actor that runs one forked process, which serves an object.
#
# Ray imports this module before any variable can be set, so nothing here loads JAX. The process is
# forked from a server with everything loaded, so that it restarts quickly.

# Gives forked processes the address of their machine, as Ray has it.
HOST_VARIABLE = "STRATAGEM_NODE_HOST"


class ServedProcess:
    """Runs one process. `name` is Ray's prefix for each line that it prints.

    `variables` are set before anything is loaded, `modules` are imported in advance.
    """

    def __init__(self, name: str, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._name = name
        ray = load("ray.util", needed_by=name, install="stratagem[ray]")
        host = {HOST_VARIABLE: str(ray.get_node_ip_address())}
        self._standby = SharedStandby(modules, {**environment.snapshot(), **host, **variables})
        self._process: ForkedProcess | None = None

    def __repr__(self) -> str:
        return self._name

    def start(self, pickled: bytes) -> tuple[str, int]:
        """Starts the process, also after an earlier one has ended; returns its address and pid.

        `pickled` is a function and its arguments, by cloudpickle; the address is its result's.
        Raises RuntimeError if an import or the function failed, UnavailableError if the process
        died.
        """
        self._process = self._standby.start(pickled)
        return self._process.address, self._process.pid

    def hold(self) -> str:
        """Waits for the end of the process and describes it."""
        assert self._process is not None
        return describe_exit(self._process.wait())

    def kill(self) -> None:
        """Sends SIGKILL to the process."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Closes the object and ends its process."""
        if self._process is not None:
            self._process.close()
        self._standby.close()

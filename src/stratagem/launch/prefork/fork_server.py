"""A process that others are forked from in a moment, as seen by who starts it."""

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.launch.prefork.server_program import CLOSE, MAX_MESSAGE_BYTES, PROGRAM
from stratagem.launch.tasks.exit_status import how_it_ended
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.messages import explain

__all__ = ["ForkedProcess", "Standby"]


class ForkedProcess:
    """A process that serves one object. It dies when this one does, however that is.

    Args:
        address: where the object is served.
        pid: the id of the process.
        wait: waits for its end, and says in words how it ended.
        channel: to it.
    """

    def __init__(
        self, address: str, pid: int, wait: Callable[[], str], channel: socket.socket
    ) -> None:
        self.address = address
        self.pid = pid
        self._wait = wait
        self._channel = channel

    def wait(self) -> str:
        """Waits for its end, and says in words how it ended."""
        how = self._wait()
        self._channel.close()
        return how

    def kill(self) -> None:
        """Kills it, as from outside."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ask_to_close(self) -> None:
        """Lets it close its object and end, and does not wait."""
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(CLOSE)

    def close(self) -> None:
        """Lets it close its object, and waits for its end."""
        self.ask_to_close()
        self.wait()


class Standby:
    """Loads modules in a process of its own, of which others are forked. Any thread may call it.

    Args:
        modules: what it loads.
        variables: of its environment and of theirs.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._changed = threading.Condition()
        self._is_ready = False
        self._is_over = False
        self._trace = ""
        self._numbers = itertools.count()
        self._ends: dict[int, int] = {}  # exit codes by number
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = (sys.executable, "-c", PROGRAM, str(theirs.fileno()))
        self._keeper = threading.Thread(
            target=self._keep,
            args=((*command, json.dumps(sys.path), json.dumps(list(modules))), variables, theirs),
            name="standby",
            daemon=True,
        )
        self._keeper.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and all that were forked from it."""
        return self._is_over

    def start(self, pickled: bytes, outputs: Sequence[int] = ()) -> ForkedProcess:
        """Forks a process as soon as all is loaded, and waits until it serves.

        Args:
            pickled: a function and its arguments; returns an object with an `address` and a
                `close()`.
            outputs: its stdout and its stderr, as descriptors of this process; none for those of
                this process.

        Raises:
            RuntimeError: what is to be loaded cannot be, or the function raises an error.
            UnavailableError: the process has died.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._is_over)
        self._require(self._trace)
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        try:
            with theirs, contextlib.suppress(OSError):  # it has ended: there will be no answer
                sent = [theirs.fileno(), *outputs]
                socket.send_fds(self._connection, [b"%d" % number], sent)
            told = _ask(ours, pickled)
            self._require(told.get("trace", ""))
        except BaseException:
            ours.close()
            raise
        return ForkedProcess(
            told["address"], told["process_id"], lambda: self._wait_for_end_of(number), ours
        )

    def close(self) -> None:
        """Ends it, and with it what was forked from it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._keeper.join()

    def _wait_for_end_of(self, number: int) -> str:
        with self._changed:
            self._changed.wait_for(lambda: number in self._ends or self._is_over)
            return how_it_ended(self._ends.get(number, -signal.SIGKILL))

    def _keep(
        self, command: Sequence[str], variables: Mapping[str, str], theirs: socket.socket
    ) -> None:
        """Starts it, in the thread that it is tied to, and hears what it tells until it ends."""
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                process = subprocess.Popen(
                    tied_command(command),
                    env=dict(variables),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
            while told := self._connection.recv(MAX_MESSAGE_BYTES):
                self._take(json.loads(told))
        except OSError as error:
            self._trace = f"{type(error).__name__}: {error}"
        finally:
            if process is not None:
                process.kill()
                process.wait()
            self._connection.close()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["kind"] == "ready":
                self._is_ready = True
            elif message["kind"] == "failed":
                self._trace = message["trace"]
            else:
                self._ends[message["number"]] = message["code"]
            self._changed.notify_all()

    def _require(self, trace: str) -> None:
        if trace:
            raise RuntimeError(
                explain(
                    f"A process cannot serve: {trace}",
                    expected="modules that can be imported, and an object that can be made.",
                    fix="look at the last lines of that traceback, which is the process's own.",
                )
            )


def _ask(channel: socket.socket, pickled: bytes) -> dict[str, Any]:
    """Tells a fork what to serve, and returns what it answers."""
    answer = b""
    with contextlib.suppress(OSError), channel.makefile("rwb") as file:  # broken: no answer
        file.write(b"%d\n" % len(pickled))
        file.write(pickled)
        file.flush()
        answer = file.readline()
    if not answer:
        raise UnavailableError(
            explain(
                "A process has died before it could serve.",
                expected="a process that lives.",
                fix="look at what it printed last, and whether its machine has the memory.",
            )
        )
    return json.loads(answer)

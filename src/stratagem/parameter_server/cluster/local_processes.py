"""Processes on this machine: forked from one that has loaded JAX and Keras once for all of them.

They need no Ray: this process starts them, watches them, and starts them again when they die.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem import environment
from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.launch.prefork.fork_server import ForkedProcess, ForkServer
from stratagem.launch.prefork.forked_object import serve_with
from stratagem.launch.tasks.exit_status import describe_exit
from stratagem.optional_libraries import load
from stratagem.parameter_server.cluster.restarts import Restarts
from stratagem.parameter_server.cluster.start_errors import (
    cannot_start,
    died_at_start,
    lost_too_often,
    not_started,
    watched_twice,
)
from stratagem.parameter_server.cluster.watchers import Watchers

__all__ = ["LocalProcesses", "SharedStandby"]

# How long an object may take to close, and its process to end.
_CLOSING_S = 5.0
# How long the last lines of a process that has ended may take to be printed here.
_PRINTING_S = 1.0


class SharedStandby(Closing):
    """The process that others are forked from; a new one takes the place of one that has died.

    Args:
        modules: what it loads.
        variables: of its environment, and of what is forked from it.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules, self._variables = modules, dict(variables)
        self._replacing = threading.Lock()
        self._standby = ForkServer(modules, self._variables)
        self._is_closed = False

    def start(self, pickled: bytes, outputs: Sequence[int]) -> ForkedProcess:
        """Forks a process; see `ForkServer.fork`."""
        with self._replacing:
            if self._standby.is_over and not self._is_closed:
                self._standby = ForkServer(self._modules, self._variables)
            standby = self._standby
        return standby.fork("object", pickled, outputs)

    def close(self) -> None:
        """Ends it, and with it what was forked from it."""
        with self._replacing:
            self._is_closed = True
        self._standby.close()


class LocalProcesses(Closing):
    """Processes of one kind on this machine, each with a thread here that keeps it running.

    Args:
        kind: their name, such as "ps"; it stands before each line that they print.
        serve: called in each with its index and its arguments; returns an object with an `address`
            and a `close()`.
        arguments: of each process.
        standby: the process that they are forked from.
        variables: set in each process where its environment has none of that name.
        max_restarts: of each process; -1 for any number.

    Raises:
        ImportError: cloudpickle is not installed.
    """

    def __init__(
        self,
        kind: str,
        serve: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        standby: SharedStandby,
        variables: Mapping[str, str] | None = None,
        max_restarts: int = -1,
    ) -> None:
        self._kind = kind
        self._standby = standby
        self._max_restarts = max_restarts
        self._changed = threading.Condition()
        self._processes: dict[int, ForkedProcess] = {}
        self._printers: dict[int, list[threading.Thread]] = {}
        self._addresses: dict[int, str] = {}
        self._errors: dict[int, Exception] = {}  # of first starts
        self._watchers: Watchers | None = None
        self._telling = threading.Lock()
        self._is_closed = False
        self._count = len(arguments)
        pickle = load("cloudpickle", needed_by="LocalProcesses", install="stratagem[ray]")
        made = dict(variables or {})
        self._pickled = [
            pickle.dumps((serve_with, (made, serve, index, *of_one)))
            for index, of_one in enumerate(arguments)
        ]
        self._keepers = [
            threading.Thread(
                target=self._keep, args=(index,), name=f"keeper of {kind} {index}", daemon=True
            )
            for index in range(self._count)
        ]
        for keeper in self._keepers:
            keeper.start()
        atexit.register(self.close)

    @property
    def addresses(self) -> list[str]:
        """Addresses in the order of the processes; waits until all have started.

        The last one, where a process was lost and has not returned.

        Raises:
            RuntimeError: one cannot start, because of an error in it.
            UnavailableError: one has died.
            DeadlineExceededError: one has not started within `STRATAGEM_JOIN_TIMEOUT_S`.
        """
        limit_s = float(environment.read("join_timeout_s"))
        with self._changed:
            self._changed.wait_for(
                lambda: self._errors or len(self._addresses) == self._count, limit_s
            )
            for error in self._errors.values():
                raise error
            missing = [index for index in range(self._count) if index not in self._addresses]
            if missing:
                raise not_started(
                    [f"{self._kind} {index}" for index in missing],
                    self._count,
                    limit_s,
                    expected="a machine that loads JAX and Keras in this time.",
                    look_at="look at how busy this machine is",
                )
            return [self._addresses[index] for index in range(self._count)]

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [self._processes[index].pid for index in range(self._count)]

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Starts processes again that die, from now on. Waits until all have started.

        Args:
            on_lost: called with the index of a process that has died, and why.
            on_returned: called with its index, and its new address.
            on_given_up: called with its index when it is not started any more, and why.

        Raises:
            RuntimeError: they are watched already, or one cannot start.
        """
        if self._watchers is not None:
            raise watched_twice(self._kind)
        _ = self.addresses
        with self._changed:
            self._watchers = Watchers(on_lost, on_returned, on_given_up)
            self._changed.notify_all()

    def kill(self, index: int) -> None:
        """Kills a process, for tests."""
        self._processes[index].kill()

    def close(self) -> None:
        """Closes what the processes serve, then ends them."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        running = dict(self._processes)
        for process in running.values():
            process.ask_to_close()
        deadline_s = time.monotonic() + _CLOSING_S
        for index, process in running.items():
            keeper = self._keepers[index]
            if keeper is not threading.current_thread():
                keeper.join(max(0.0, deadline_s - time.monotonic()))
                process.kill()
                keeper.join()

    def _keep(self, index: int) -> None:
        """Runs a process again and again; in a thread of its own."""
        restarts = Restarts(self._max_restarts)
        process = self._first(index)
        while process is not None:
            started_s = time.monotonic()
            how = describe_exit(process.wait())
            for printer in self._printers[index]:
                printer.join(_PRINTING_S)  # a process that it has started itself may print on
            if not self._tell(lambda told, how=how: told.on_lost(index, f"it died: {how}")):
                return
            delay_s = restarts.delay_after_loss_s(time.monotonic() - started_s)
            if delay_s is None:
                gone = lost_too_often(f"{self._kind} {index}", how)
                self._tell(lambda told, gone=gone: told.on_given_up(index, gone))
                return
            process = self._next(index, restarts, delay_s)

    def _first(self, index: int) -> ForkedProcess | None:
        try:
            return self._start(index)
        except Exception as error:  # noqa: BLE001 - raised by `addresses`
            with self._changed:
                self._errors[index] = error
                self._changed.notify_all()
            return None

    def _next(self, index: int, restarts: Restarts, delay_s: float | None) -> ForkedProcess | None:
        """Starts a process in the place of one that has died; None where it is given up."""
        failure: Exception | None = None
        while delay_s is not None:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, delay_s):
                    return None
            try:
                process = self._start(index)
            except (RuntimeError, UnavailableError) as error:
                failure = error
                delay_s = restarts.delay_after_failed_start_s()
                continue
            restarts.started()
            self._tell(lambda told: told.on_returned(index, self._addresses[index]))
            return process
        assert failure is not None
        gone = failure
        self._tell(lambda told: told.on_given_up(index, gone))
        return None

    def _start(self, index: int) -> ForkedProcess | None:
        """Starts a process once; None where these processes were closed meanwhile."""
        name = f"{self._kind} {index}"
        pipes = [os.pipe() for _ in range(2)]
        self._printers[index] = [
            threading.Thread(target=_pass_on, args=(ours, name, stream), daemon=True)
            for (ours, _), stream in zip(pipes, ("stdout", "stderr"), strict=True)
        ]
        for printer in self._printers[index]:
            printer.start()
        try:
            process = self._standby.start(self._pickled[index], [theirs for _, theirs in pipes])
        except RuntimeError as error:
            raise cannot_start(name, error) from error
        except UnavailableError as error:
            raise died_at_start(name, error) from error
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        with self._changed:
            if self._is_closed:
                process.kill()
                process.wait()
                return None
            self._processes[index], self._addresses[index] = process, process.address
            self._changed.notify_all()
        return process

    def _tell(self, tell: Callable[[Watchers], None]) -> bool:
        """Reports an event once there are watchers; returns False if closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._watchers is not None or self._is_closed)
            watchers = self._watchers
            if self._is_closed or watchers is None:
                return False
        with self._telling:  # one after the other, in the order in which it happens
            watchers.tell(tell)
        return True


def _pass_on(descriptor: int, name: str, stream: str) -> None:
    """Prints the lines of a process on this one's stream of the same kind, each after its name."""
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            target = getattr(sys, stream)
            target.write(f"[{name}] {line.removesuffix(chr(10))}\n")
            target.flush()

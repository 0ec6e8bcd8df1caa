"""Processes on this machine: forked, watched and restarted without Ray.

Their parent process imports JAX and Keras once for all of them.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem import logs, settings
from stratagem.environment import load
from stratagem.errors import DeadlineExceededError, UnavailableError, explain, report_error
from stratagem.launch.prefork.fork_server import ForkedProcess, ForkServer
from stratagem.launch.prefork.server_program import serve_with
from stratagem.launch.tasks.exit_status import describe_exit
from stratagem.resources import Closing

# Restart policy of a process: restart delays and limits, without side effects.

# Consecutive failed starts before giving up.
MAX_FAILED_STARTS = 5
# A process that ran this long does not fail at its start, so delays start over.
_STABLE_S = 3.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


class Restarts:
    """Restart delays of one process: none at first, then exponential backoff.

    `max_restarts=-1` sets no limit.
    """

    def __init__(self, max_restarts: int = -1) -> None:
        self._max_restarts = max_restarts
        self._num_losses = 0
        self._num_in_a_row = 0
        self._num_failed_starts = 0

    def started(self) -> None:
        """Records a successful start."""
        self._num_failed_starts = 0

    def delay_after_loss_s(self, lived_s: float) -> float | None:
        """Returns the delay before a restart, after a run of `lived_s`; None to give up."""
        self._num_losses += 1
        if lived_s >= _STABLE_S:
            self._num_in_a_row = 0
        if 0 <= self._max_restarts < self._num_losses:
            return None
        return self._next_delay_s()

    def delay_after_failed_start_s(self) -> float | None:
        """Returns the delay before the next start, after a failed one; None to give up."""
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        return self._next_delay_s()

    def _next_delay_s(self) -> float:
        doublings = self._num_in_a_row - 1
        self._num_in_a_row += 1
        return 0.0 if doublings < 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**doublings)


# Callbacks for losses and returns of processes.


@dataclasses.dataclass(frozen=True)
class Watchers:
    """Callbacks of `watch`; an error in one is reported, and watching continues.

    Each takes the index of a process, and the reason of its loss, its new address, or the error
    that ended its restarts.
    """

    on_lost: Callable[[int, str], None]
    on_returned: Callable[[int, str], None]
    on_given_up: Callable[[int, Exception], None]

    def report(self, event: Callable[[Watchers], None]) -> None:
        """Calls one of the callbacks by `event`."""
        try:
            event(self)
        except Exception as error:  # noqa: BLE001 - watching must continue
            report_error(error)


# Errors of servers and workers that fail to start or restart.

_logger = logging.getLogger(__name__)


def announce_failed_restart(name: str, error: Exception, delay_s: float) -> None:
    """Prints why a process such as "ps 0" did not start again; a later start may succeed."""
    logs.announce(_logger, f"{name} did not start again; next try in {delay_s:g} s. {error}")


def cannot_start(name: str, error: BaseException) -> RuntimeError:
    """Returns the error of a process such as "ps 0" whose imports or function fail."""
    return RuntimeError(
        explain(
            f"{name} cannot start: {error}",
            expected="a process that imports and starts without an error.",
            fix="fix the error in the last lines of the traceback, which is from that process.",
            code="SG601",
        )
    )


def died_at_start(name: str, error: BaseException) -> UnavailableError:
    """Returns the error of a process that ends before it serves."""
    return UnavailableError(
        explain(
            f"{name} died while starting: {error}",
            expected="a process that keeps running.",
            fix="check its last output, and whether its machine has enough memory.",
            code="SG601",
        )
    )


def lost_too_often(name: str, how: object) -> UnavailableError:
    """Returns the error of a process that has ended once more than `max_restarts`."""
    return UnavailableError(
        explain(
            f"{name} ended and has no restarts left: {how}",
            expected="a process that keeps running.",
            fix="check its last output, or raise max_restarts.",
            code="SG602",
        )
    )


def not_started(
    names: list[str], count: int, limit_s: float, *, expected: str, look_at: str
) -> DeadlineExceededError:
    """Returns the error of processes, out of `count`, that have not started in time."""
    return DeadlineExceededError(
        explain(
            f"{len(names)} of {count} processes did not start within {limit_s:g} s: "
            f"{', '.join(names)}.",
            expected=expected,
            fix=f"{look_at}; set STRATAGEM_JOIN_TIMEOUT_S to wait longer.",
            code="SG601",
        )
    )


def watched_twice(kind: str) -> RuntimeError:
    """Returns the error of a second call of `watch`."""
    return RuntimeError(
        explain(
            f"watch() was called twice for processes of kind {kind!r}.",
            expected="one call of watch().",
            fix="pass callbacks that notify every listener.",
        )
    )


def not_the_coordinator() -> RuntimeError:
    """Returns the error of a `ClusterCoordinator` created by an independent worker."""
    return RuntimeError(
        explain(
            "A ClusterCoordinator was created in a worker that runs its own program.",
            expected="strategy.run or fit in this program.",
            fix="omit independent=True if one process coordinates the others.",
            code="SG511",
        )
    )


# Processes on this machine: forked, watched and restarted without Ray.

# Limit on closing an object and ending its process.
_CLOSING_S = 5.0
# Limit on printing the last lines of a dead process.
_PRINTING_S = 1.0


class SharedStandby(Closing):
    """Process to fork others from; it is replaced if it dies or is stuck.

    A stuck one is kept until the end: those forked from it would end with it.

    It imports `modules`. `variables` are its environment, which forked processes inherit.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules, self._variables = modules, dict(variables)
        self._replacing = threading.Lock()
        self._standby = ForkServer(modules, self._variables)
        self._stuck: list[ForkServer] = []
        self._is_closed = False

    def start(self, pickled: bytes, outputs: Sequence[int]) -> ForkedProcess:
        """Forks a process; see `ForkServer.fork`."""
        standby = self._current()
        try:
            return standby.fork("object", pickled, outputs)
        except UnavailableError:
            if not standby.is_stuck:
                raise
        return self._current().fork("object", pickled, outputs)

    def _current(self) -> ForkServer:
        with self._replacing:
            is_stuck = self._standby.is_stuck
            if (is_stuck or self._standby.is_over) and not self._is_closed:
                if is_stuck:
                    self._stuck.append(self._standby)
                self._standby = ForkServer(self._modules, self._variables)
            return self._standby

    def close(self) -> None:
        """Stops this process and those forked from it."""
        with self._replacing:
            self._is_closed = True
        for standby in (self._standby, *self._stuck):
            standby.close()


class LocalProcesses(Closing):
    """Processes of one kind on this machine, each restarted by a thread of this process.

    `serve` is called in each process with its index and its `arguments`; it returns an object with
    an `address` and a `close()`. Lines of their output are printed here after `kind`, a name such
    as "ps". `variables` are set where the environment lacks them. `max_restarts=-1` sets no limit.
    `first` is the number of the first process in names.
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
        first: int = 0,
    ) -> None:
        self._kind = kind
        self._first_number = first
        self._standby = standby
        self._max_restarts = max_restarts
        self._changed = threading.Condition()
        self._processes: dict[int, ForkedProcess] = {}
        self._printers: dict[int, list[threading.Thread]] = {}
        self._addresses: dict[int, str] = {}
        self._errors: dict[int, Exception] = {}  # of initial starts
        self._watchers: Watchers | None = None
        self._reporting = threading.Lock()
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
                target=self._keep,
                args=(index,),
                name=f"keeper of {self._name(index)}",
                daemon=True,
            )
            for index in range(self._count)
        ]
        for keeper in self._keepers:
            keeper.start()
        atexit.register(self.close)

    @property
    def addresses(self) -> list[str]:
        """Addresses by index, the last ones of lost processes; waits until all have started.

        Raises:
            RuntimeError: a process cannot start, because of an error in it.
            UnavailableError: a process has died.
            DeadlineExceededError: a process has not started within `STRATAGEM_JOIN_TIMEOUT_S`.
        """
        limit_s = float(settings.read("join_timeout_s"))
        with self._changed:
            self._changed.wait_for(
                lambda: self._errors or len(self._addresses) == self._count, limit_s
            )
            for error in self._errors.values():
                raise error.with_traceback(None)  # raised by each call: without earlier frames
            missing = [index for index in range(self._count) if index not in self._addresses]
            if missing:
                raise not_started(
                    [self._name(index) for index in missing],
                    self._count,
                    limit_s,
                    expected="processes that load JAX and Keras within this time.",
                    look_at="check whether this machine is overloaded",
                )
            return [self._addresses[index] for index in range(self._count)]

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [self._processes[index].pid for index in range(self._count)]

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Restarts processes that die, from now on; waits until all have started.

        See `Watchers`. Raises a RuntimeError if called twice, or if a process cannot
        start.
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
        """Closes the served objects, then stops the processes."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        for process in [*self._processes.values()]:
            process.ask_to_close()
        deadline_s = time.monotonic() + _CLOSING_S
        for index, keeper in enumerate(self._keepers):
            if keeper is threading.current_thread():
                continue
            keeper.join(max(0.0, deadline_s - time.monotonic()))
            if index in self._processes:  # the others have not started yet
                self._processes[index].kill()
                keeper.join()

    def _name(self, index: int) -> str:
        return f"{self._kind} {self._first_number + index}"

    def _keep(self, index: int) -> None:
        """Runs a process and its restarts until closed; in its own thread."""
        restarts = Restarts(self._max_restarts)
        process = self._first(index)
        while process is not None:
            started_s = time.monotonic()
            how = describe_exit(process.wait())
            for printer in self._printers[index]:
                printer.join(_PRINTING_S)  # limited: its own children may still print
            reason = f"it died: {how}"
            if not self._report(lambda watchers, reason=reason: watchers.on_lost(index, reason)):
                return
            delay_s = restarts.delay_after_loss_s(time.monotonic() - started_s)
            if delay_s is None:
                gone = lost_too_often(self._name(index), how)
                self._report(lambda watchers, gone=gone: watchers.on_given_up(index, gone))
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
        """Starts a replacement of a dead process; returns None once restarts are given up."""
        failure: Exception | None = None
        while delay_s is not None:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, delay_s):
                    return None
            try:
                process = self._start(index)
            except Exception as error:  # noqa: BLE001 - also OSError: no memory or descriptors left
                failure = error
                delay_s = restarts.delay_after_failed_start_s()
                if delay_s is not None:
                    announce_failed_restart(self._name(index), error, delay_s)
                continue
            restarts.started()
            self._report(lambda watchers: watchers.on_returned(index, self._addresses[index]))
            return process
        assert failure is not None
        gone = failure
        self._report(lambda watchers: watchers.on_given_up(index, gone))
        return None

    def _start(self, index: int) -> ForkedProcess | None:
        """Starts a process once; returns None if closed meanwhile."""
        name = self._name(index)
        self._printers[index] = []
        outputs: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                ours, theirs = os.pipe()
                outputs.append(theirs)
                printer = threading.Thread(target=_pass_on, args=(ours, name, stream), daemon=True)
                printer.start()
                self._printers[index].append(printer)
            process = self._standby.start(self._pickled[index], outputs)
        except RuntimeError as error:
            raise cannot_start(name, error) from error
        except UnavailableError as error:
            raise died_at_start(name, error) from error
        finally:
            for theirs in outputs:
                os.close(theirs)
        with self._changed:
            self._processes[index], self._addresses[index] = process, process.address
            is_closed = self._is_closed
            self._changed.notify_all()
        if is_closed:
            process.ask_to_close()  # what it has made is not removed if it is killed
            killing = threading.Timer(_CLOSING_S, process.kill)
            killing.start()
            process.wait()
            killing.cancel()
            return None
        return process

    def _report(self, event: Callable[[Watchers], None]) -> bool:
        """Reports an event once there are watchers; returns False if closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._watchers is not None or self._is_closed)
            watchers = self._watchers
            if self._is_closed or watchers is None:
                return False
        with self._reporting:  # events must arrive in order
            watchers.report(event)
        return True


def _pass_on(descriptor: int, name: str, stream: str) -> None:
    """Prints each line of a process, after its name, on this process's stream of that name."""
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            target = getattr(sys, stream)
            target.write(f"[{name}] {line.removesuffix(chr(10))}\n")
            target.flush()

"""Servers and workers: started together, watched, and restarted when they die.

`LocalProcesses` are forked on this machine from a process that has imported JAX and Keras once;
`RayProcesses` are placed on a cluster by Ray, where an actor forks each in the same way.

One thread of this process keeps each of them: it starts the process, waits for its end, reports the
loss, waits as long as `Restarts` says, and starts it again, until `close` or until starts fail too
often. Watchers hear of a loss before the return, and of one event at a time.
"""

from __future__ import annotations

import abc
import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem import logs, settings
from stratagem.environment import load
from stratagem.errors import (
    DeadlineExceededError,
    UnavailableError,
    explain,
    invalid,
    report_error,
)
from stratagem.launch.prefork.fork_server import ForkedProcess, ServedProcess, SharedStandby
from stratagem.launch.prefork.server_program import serve_with
from stratagem.launch.remote.ray_cluster import RayWatch, is_ray_lost, load_ray, watched_addresses
from stratagem.launch.restart.policy import Backoff
from stratagem.launch.tasks.exit_status import describe_exit
from stratagem.resources import Closing, remove_abandoned_folders

_logger = logging.getLogger(__name__)

# Restart policy of a process: restart delays and limits, without side effects.

# Consecutive failed starts before giving up.
MAX_FAILED_STARTS = 5
# A process that ran this long does not fail at its start, so delays start over.
_STABLE_S = 3.0


class Restarts:
    """Delays and limits of the restarts of one process; `max_restarts=-1` sets no limit."""

    def __init__(self, max_restarts: int = -1) -> None:
        self._max_restarts = max_restarts
        self._num_losses = 0
        self._backoff = Backoff(_STABLE_S)
        self._num_failed_starts = 0

    def started(self) -> None:
        """Records a successful start."""
        self._num_failed_starts = 0

    def delay_after_loss_s(self, lived_s: float) -> float | None:
        """Returns the delay before a restart, after a run of `lived_s`; None to give up."""
        self._num_losses += 1
        if 0 <= self._max_restarts < self._num_losses:
            return None
        return self._backoff.delay_s(lived_s)

    def delay_after_failed_start_s(self) -> float | None:
        """Returns the delay before the next start, after a failed one; None to give up."""
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        return self._backoff.delay_s()


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


# Processes of one kind, wherever they run.

# Limit on closing an object and ending its process.
_CLOSING_S = 5.0


class _Processes(Closing, abc.ABC):
    """Processes of one kind, each kept by a thread of this process.

    `serve` is called in each process with its index and its `arguments`; it returns an object with
    an `address` and a `close()`. `kind` is a name such as "ps". `max_restarts=-1` sets no limit.
    """

    _expected: str  # of processes that do not start in time, and what to look at then
    _look_at: str

    def __init__(
        self,
        kind: str,
        serve: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        max_restarts: int,
    ) -> None:
        self._kind = kind
        self._max_restarts = max_restarts
        self._changed = threading.Condition()
        self._processes: dict[int, ForkedProcess | _RayProcess] = {}
        self._addresses: dict[int, str] = {}
        self._errors: dict[int, Exception] = {}  # of initial starts
        self._started_s: dict[int, float] = {}
        self._watchers: dict[str, Callable[[int, Any], None]] = {}
        self._reporting = threading.Lock()
        self._is_closed = False
        pickle = load("cloudpickle", needed_by="a cluster", install="stratagem[ray]")
        self._pickled = [
            pickle.dumps((serve, (index, *of_one))) for index, of_one in enumerate(arguments)
        ]
        self._keepers = [
            threading.Thread(target=self._keep, args=(index,), name=f"{kind} {index}", daemon=True)
            for index in range(len(arguments))
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
        limit_s, count = float(settings.read("join_timeout_s")), len(self._keepers)
        with self._changed:
            self._changed.wait_for(lambda: self._errors or len(self._addresses) == count, limit_s)
            for error in self._errors.values():
                raise error.with_traceback(None)  # raised by each call: without earlier frames
            missing = [index for index in range(count) if index not in self._addresses]
            if not missing:
                return [self._addresses[index] for index in range(count)]
        raise DeadlineExceededError(
            explain(
                f"{len(missing)} of {count} processes did not start within {limit_s:g} s: "
                f"{', '.join(map(self._described, missing))}.",
                expected=self._expected,
                fix=f"{self._look_at}; set STRATAGEM_JOIN_TIMEOUT_S to wait longer.",
                code="SG601",
            )
        )

    @property
    def pids(self) -> list[int]:
        """Process ids, each on its machine."""
        return [self._processes[index].pid for index in range(len(self._keepers))]

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Restarts processes that die, from now on; waits until all have started.

        Each watcher takes the index of a process, and the reason of its loss, its new address, or
        the error that ended its restarts. An error in one is reported, and watching continues.
        Raises a RuntimeError if called twice, or if a process cannot start.
        """
        if self._watchers:
            raise RuntimeError(
                explain(
                    f"watch() was called twice for processes of kind {self._kind!r}.",
                    expected="one call of watch().",
                    fix="pass callbacks that notify every listener.",
                )
            )
        _ = self.addresses
        with self._changed:
            self._watchers = {"lost": on_lost, "returned": on_returned, "given up": on_given_up}
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
        others = [one for one in self._keepers if one is not threading.current_thread()]
        for keeper in others:
            keeper.join(max(0.0, deadline_s - time.monotonic()))
        self._kill()
        for index in [*self._processes]:  # the others have not started yet
            if self._keepers[index] in others:
                self._keepers[index].join(_CLOSING_S)
        remove_abandoned_folders()

    def _keep(self, index: int) -> None:
        """Runs a process and its restarts until closed; in its own thread."""
        restarts = Restarts(self._max_restarts)
        try:
            process = self._start_once(index)
        except Exception as error:  # noqa: BLE001 - raised by `addresses`
            with self._changed:
                self._errors[index] = error
                self._changed.notify_all()
            return
        while process is not None:
            how = self._wait(index, process)
            # Before watchers hear of it: they may take seconds, in which nothing lived.
            lived_s = time.monotonic() - self._started_s[index]
            if not self._report("lost", index, f"it died: {how}"):
                return
            delay_s = restarts.delay_after_loss_s(lived_s)
            if delay_s is None:
                gone = UnavailableError(
                    explain(
                        f"{self._kind} {index} ended and has no restarts left: {how}",
                        expected="a process that keeps running.",
                        fix="check its last output, or raise max_restarts.",
                        code="SG602",
                    )
                )
                self._report("given up", index, gone)
                return
            process = self._start_again(index, restarts, delay_s)

    def _start_again(
        self, index: int, restarts: Restarts, delay_s: float
    ) -> ForkedProcess | _RayProcess | None:
        """Starts a replacement of a dead process; returns None once closed or given up."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, delay_s):
                    return None
            try:
                process = self._start_once(index)
            except Exception as error:  # noqa: BLE001 - also OSError: no memory or descriptors left
                next_s = restarts.delay_after_failed_start_s()
                if self._is_closed:  # it may have failed because of that
                    return None
                if next_s is None:
                    self._report("given up", index, error)
                    return None
                # Before it is given up: why callers get no answer meanwhile.
                name = f"{self._kind} {index}"
                logs.announce(
                    _logger, f"{name} did not start again; next try in {next_s:g} s. {error}"
                )
                delay_s = next_s
                continue
            restarts.started()
            self._report("returned", index, self._addresses[index])
            return process

    def _start_once(self, index: int) -> ForkedProcess | _RayProcess | None:
        """Starts a process, with errors that name it; returns None if closed meanwhile."""
        name = f"{self._kind} {index}"
        try:
            process = self._start(index)
        except UnavailableError as error:
            raise UnavailableError(
                explain(
                    f"{name} died while starting: {error}",
                    expected="a process that keeps running.",
                    fix="check its last output, and whether its machine has enough memory.",
                    code="SG601",
                )
            ) from error
        except RuntimeError as error:
            raise RuntimeError(
                explain(
                    f"{name} cannot start: {error}",
                    expected="a process that imports and starts without an error.",
                    fix="fix the error in the last lines of the traceback, which is from that "
                    "process.",
                    code="SG601",
                )
            ) from error
        with self._changed:
            self._processes[index], self._addresses[index] = process, process.address
            self._started_s[index] = time.monotonic()
            is_closed = self._is_closed
            self._changed.notify_all()
        if not is_closed:
            return process
        process.ask_to_close()  # what it has made is not removed if it is killed
        killing = threading.Timer(_CLOSING_S, process.kill)
        killing.start()
        self._wait(index, process)
        killing.cancel()
        return None

    def _report(self, event: str, index: int, detail: object) -> bool:
        """Reports an event once there are watchers; returns False if closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._watchers or self._is_closed)
        with self._reporting:  # events must arrive in order
            if self._is_closed:
                return False
            try:
                self._watchers[event](index, detail)
            except Exception as error:  # noqa: BLE001 - watching must continue
                report_error(error)
            return True

    def _described(self, index: int) -> str:
        return f"{self._kind} {index}"

    @abc.abstractmethod
    def _start(self, index: int) -> ForkedProcess | _RayProcess:
        """Starts a process; RuntimeError for an error in it, UnavailableError if it died."""

    @abc.abstractmethod
    def _wait(self, index: int, process: Any) -> str:
        """Waits for the end of a process and describes it."""

    def _kill(self) -> None:
        """Kills processes that have not closed in time."""
        for process in [*self._processes.values()]:
            process.kill()


# Processes on this machine.

# Limit on printing the last lines of a dead process.
_PRINTING_S = 1.0


class LocalProcesses(_Processes):
    """Processes of one kind on this machine, forked from `standby`; see `_Processes`.

    Lines of their output are printed here after `kind` and index. `variables` are set where the
    environment lacks them.
    """

    _expected = "processes that load JAX and Keras within this time."
    _look_at = "check whether this machine is overloaded"

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
        self._standby = standby
        self._printers: dict[int, list[threading.Thread]] = {}
        serve = functools.partial(serve_with, dict(variables or {}), serve)
        super().__init__(kind, serve, arguments, max_restarts)

    def _start(self, index: int) -> ForkedProcess:
        self._printers[index] = []
        outputs: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                ours, theirs = os.pipe()
                outputs.append(theirs)
                printer = threading.Thread(
                    target=_pass_on, args=(ours, f"{self._kind} {index}", stream), daemon=True
                )
                printer.start()
                self._printers[index].append(printer)
            return self._standby.start(self._pickled[index], outputs)
        finally:
            for theirs in outputs:
                os.close(theirs)

    def _wait(self, index: int, process: Any) -> str:
        code = process.wait()
        for printer in self._printers[index]:
            printer.join(_PRINTING_S)  # limited: its own children may still print
        return describe_exit(code)


def _pass_on(descriptor: int, name: str, stream: str) -> None:
    """Prints each line of a process, after its name, on this process's stream of that name."""
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            target = getattr(sys, stream)
            target.write(f"[{name}] {line.removesuffix(chr(10))}\n")
            target.flush()


# Processes placed by Ray. An actor forks each one and forks it again. Ray never restarts the actor:
# it would retry without a delay and report less about a failed start. Instead a new actor with the
# same resources replaces a dead one.

# One call blocks until the process ends; the others are sequential.
_MAX_CALLS_AT_ONCE = 4
# Delay after losing the connection to a process that may be alive.
_LOOK_AGAIN_S = 0.5


class _RayProcess:
    """A process that an actor keeps, with its address and process id."""

    def __init__(self, actor: Any, address: str, pid: int) -> None:
        self.actor, self.address, self.pid = actor, address, pid

    def kill(self) -> None:
        self.actor.kill.remote()

    def ask_to_close(self) -> None:
        self.actor.close.remote()


class RayProcesses(_Processes):
    """Processes of one kind, on the Ray cluster that this process is connected to.

    `resources` are Ray resources of each process: "CPU", "GPU" and custom ones such as {"ps:0": 1};
    with None, processes are spread over the machines. `environment` is set before JAX is imported.
    `modules` are imported before a process is forked, and not again for a restart.
    """

    _expected = "machines in the Ray cluster with the resources that each process needs."
    _look_at = "start the missing tasks, and check `ray status`"

    def __init__(
        self,
        kind: str,
        serve: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        resources: Sequence[Mapping[str, float]] | None = None,
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        max_restarts: int = -1,
    ) -> None:
        if resources is not None and len(resources) != len(arguments):
            raise invalid(
                f"{len(arguments)} processes of kind {kind!r} received {len(resources)} resources.",
                expected="resources for each process, or None.",
                fix="pass one mapping per process.",
            )
        self._ray = load_ray()
        if not self._ray.is_initialized():
            raise RuntimeError(
                explain(
                    "Processes cannot start: this process is not connected to Ray.",
                    expected="a connection to a Ray cluster.",
                    fix="call RayCluster().wait() first.",
                )
            )
        self._class: Any = self._ray.remote(ServedProcess)
        self._resources = resources or [{}] * len(arguments)
        self._environment, self._modules = dict(environment or {}), tuple(modules)
        self._actors: dict[int, Any] = {}
        self._ray_watch: RayWatch | None = None
        super().__init__(kind, serve, arguments, max_restarts)

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Also gives up all processes once Ray is lost, which alone could start or stop them."""
        super().watch(on_lost, on_returned, on_given_up)
        self._ray_watch = RayWatch(watched_addresses(), self._lose_ray)

    def close(self) -> None:
        """Closes the served objects, then stops the processes."""
        if self._ray_watch is not None:
            self._ray_watch.close()
        if is_ray_lost() or not self._ray.is_initialized():  # so its processes end, too
            self._is_closed = True
            atexit.unregister(self.close)
            return
        for index, actor in self._actors.copy().items():  # keepers drop some meanwhile
            if index not in self._processes:
                self._ray.kill(actor)  # it may wait for a machine without end
        super().close()

    def _described(self, index: int) -> str:
        needs = self._resources[index]
        return f"{self._kind} {index}" + (f", which needs {dict(needs)}" if needs else "")

    def _start(self, index: int) -> _RayProcess:
        """Starts a process in its actor, or in a new one where that is gone."""
        actor = self._actors.get(index) or self._new_actor(index)
        self._actors[index] = actor
        errors = self._ray.exceptions
        try:
            # A future waits in Python: a call of Ray would not return once Ray is lost.
            address, pid = actor.start.remote(self._pickled[index]).future().result()
        except errors.RayError as error:
            self._drop(index)
            if isinstance(error, UnavailableError):  # the actor was alive, its process was not
                raise
            kind = RuntimeError if isinstance(error, errors.RayTaskError) else UnavailableError
            raise kind(str(error)) from error
        return _RayProcess(actor, address, pid)

    def _new_actor(self, index: int) -> Any:
        needs = dict(self._resources[index])
        options: dict[str, Any] = {} if needs else {"scheduling_strategy": "SPREAD"}
        # Ray takes CPUs and GPUs apart from other resources.
        options |= {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0)}
        return self._class.options(
            resources=needs, max_concurrency=_MAX_CALLS_AT_ONCE, **options
        ).remote(f"{self._kind}:{index}", self._modules, self._environment)

    def _wait(self, index: int, process: Any) -> str:
        errors = self._ray.exceptions
        while True:
            try:
                return process.actor.hold.remote().future().result()
            except errors.ActorUnavailableError:
                # Disconnected but perhaps alive; it is dead once Ray gives up its machine.
                time.sleep(_LOOK_AGAIN_S)
            except errors.RayError as error:
                self._drop(index)
                return str(error)

    def _drop(self, index: int) -> None:
        self._ray.kill(self._actors.pop(index))

    def _kill(self) -> None:
        for actor in [*self._actors.values()]:
            self._ray.kill(actor)

    def _lose_ray(self, error: Exception) -> None:
        for index in range(len(self._keepers)):
            self._report("lost", index, str(error))
            self._report("given up", index, error)
        with self._reporting:
            self._is_closed = True  # nothing is left to close, and nothing more to report

"""Processes that Ray places: started together, watched, and started again when they die.

A process is kept by an actor, which starts it again in a moment. An actor that dies itself is never
restarted by Ray: its restarts wait for nothing between two attempts, and of an actor whose start
fails it says less. So a new actor takes its place, which asks for the same resources.
"""

from __future__ import annotations

import atexit
import dataclasses
import heapq
import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem import environment
from stratagem.closing import Closing
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.prefork.served_process import ServedProcess
from stratagem.messages import explain
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
from stratagem.remote.ray.ray_cluster import load_ray

__all__ = ["RayProcesses"]

# One call holds, and the others come one after the other.
_MAX_CALLS_AT_ONCE = 4
# How long an object may take to close, and its process to end.
_CLOSING_S = 5.0
# After a connection has failed to a process that may be alive.
_LOOK_AGAIN_S = 0.5


@dataclasses.dataclass(eq=False)
class _Life:
    """One process from its start to its death."""

    actor: Any
    started: Any
    address: str = ""
    pid: int = 0
    hold: Any = None
    since_s: float = 0.0
    is_over: bool = False


class RayProcesses(Closing):
    """Processes of one kind, on the Ray cluster that this process is connected to.

    Args:
        kind: what they are, such as "ps"; it stands before what they print.
        serve: called in each with its index and its arguments; returns an object with an `address`
            and a `close()`.
        arguments: of each process.
        resources: of each process, what Ray must find for it: "CPU", "GPU" and those of the user,
            such as {"ps:0": 1}. None for none; then they are spread over the machines.
        environment: variables, set in each process before JAX is loaded there.
        modules: what each process needs; loaded before it is started, and not again when it is
            started again.
        max_restarts: of each process; -1 for any number.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: this process is not connected to Ray.
        ValueError: not as many resources as processes.
    """

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
            raise ValueError(
                explain(
                    f"{len(arguments)} processes of kind {kind!r} have {len(resources)} resources.",
                    expected="resources for each process, or None.",
                    fix="pass as many as there are processes.",
                )
            )
        self._ray = _connected_ray()
        self._kind = kind
        self._resources = resources or [{}] * len(arguments)
        self._environment = dict(environment or {})
        self._modules = tuple(modules)
        pickle = load("cloudpickle", needed_by="RayProcesses", install="stratagem[ray]")
        self._pickled = [
            pickle.dumps((serve, (index, *of_one))) for index, of_one in enumerate(arguments)
        ]
        self._class: Any = self._ray.remote(ServedProcess)
        self._cluster = uuid.uuid4().hex[:8]  # names are unique among all actors
        self._num_starts = 0
        self._lives = [self._start(index) for index in range(len(arguments))]
        self._restarts = [Restarts(max_restarts) for _ in arguments]
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap of what is for later
        self._numbers = itertools.count()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watchers: Watchers | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()
        atexit.register(self.close)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the processes, in order; waits until all have started.

        Of one that was lost and has not returned, where it was.

        Raises:
            RuntimeError: one cannot start, because of an error in it.
            UnavailableError: one has died.
            DeadlineExceededError: one has not started within `STRATAGEM_JOIN_TIMEOUT_S`.
        """
        limit_s = float(environment.read("join_timeout_s"))
        deadline_s = time.monotonic() + limit_s
        while missing := [index for index, one in enumerate(self._lives) if one.hold is None]:
            starts = {self._lives[index].started: index for index in missing}
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, _ = self._ray.wait(list(starts), num_returns=1, timeout=left_s)
            if not ready:
                raise self._too_late(missing, limit_s)
            for started in ready:
                self._take_start(starts[started])
        return [one.address for one in self._lives]

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, each on its own machine."""
        return [one.pid for one in self._lives]

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Starts processes again that die, from now on. Waits until all have started.

        All is told in one thread, in the order in which it happens.

        Args:
            on_lost: called with the index of a process that has died, and why.
            on_returned: called with its index, and its new address.
            on_given_up: called with its index when it is not started any more, and why.

        Raises:
            RuntimeError: they are watched already, or one cannot start.
        """
        if self._thread is not None:
            raise watched_twice(self._kind)
        _ = self.addresses
        self._watchers = Watchers(on_lost, on_returned, on_given_up)
        for index, life in enumerate(self._lives):
            self._hold(index, life)
        self._thread = threading.Thread(
            target=self._watch, name=f"stratagem-watch-{self._kind}", daemon=True
        )
        self._thread.start()

    def kill(self, index: int) -> None:
        """Kills a process, for tests.

        Args:
            index: which.
        """
        self._lives[index].actor.kill.remote()

    def kill_keeper(self, index: int) -> None:
        """Kills a process with the one that keeps it, as a machine that fails does; for tests.

        Args:
            index: which.
        """
        self._ray.kill(self._lives[index].actor)

    def close(self) -> None:
        """Closes what the processes serve, then ends them."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._events.put(lambda: None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        ray = self._ray
        if not ray.is_initialized():  # and so its processes have ended
            return
        running = [one for one in self._lives if one.hold is not None]
        self._wait_for([one.actor.close.remote() for one in running])
        for one in self._lives:
            ray.kill(one.actor)
        self._wait_for([one.hold for one in running])

    def _wait_for(self, calls: list[Any]) -> None:
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=_CLOSING_S)

    def _start(self, index: int, actor: Any = None) -> _Life:
        """Starts a process, by an actor that has kept one before or by a new one."""
        actor = actor or self._new_actor(index)
        return _Life(
            actor, actor.start.remote(self._environment, self._modules, self._pickled[index])
        )

    def _new_actor(self, index: int) -> Any:
        self._num_starts += 1
        return self._class.options(
            name=f"{self._kind}:{index} {self._cluster}.{self._num_starts}",
            max_restarts=0,
            max_concurrency=_MAX_CALLS_AT_ONCE,
            **_placement(self._resources[index]),
        ).remote(f"{self._kind}:{index}")

    def _take_start(self, index: int) -> None:
        """Notes that a process has started, or raises why not."""
        life, name = self._lives[index], f"{self._kind} {index}"
        errors = self._ray.exceptions
        try:
            life.address, life.pid = self._ray.get(life.started)
        except errors.RayTaskError as error:
            if isinstance(error, UnavailableError):  # the actor lives, but not its process
                raise died_at_start(name, error) from error
            raise cannot_start(name, error) from error
        except errors.RayError as error:
            raise died_at_start(name, error) from error
        life.since_s = time.monotonic()
        life.hold = life.actor.hold.remote()

    def _too_late(self, missing: list[int], limit_s: float) -> DeadlineExceededError:
        names = [
            f"{self._kind} {index}"
            + (f", which needs {dict(of_one)}" if (of_one := self._resources[index]) else "")
            for index in missing
        ]
        return not_started(
            names,
            len(self._lives),
            limit_s,
            expected="machines in the Ray cluster that have what each process needs.",
            look_at="start the tasks that are missing, and look at what `ray status` says",
        )

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            try:
                event = self._events.get(timeout=wait_s)
            except queue.Empty:
                _, _, event = heapq.heappop(self._due)
            if not self._is_closed.is_set():
                event()

    def _later(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), event))

    def _hold(self, index: int, life: _Life) -> None:
        """Lets the end of a process be an event."""
        life.hold.future().add_done_callback(
            lambda future: self._events.put(
                lambda: self._take_end(index, life, future.exception() or future.result())
            )
        )

    def _hold_again(self, index: int, life: _Life) -> None:
        life.hold = life.actor.hold.remote()
        self._hold(index, life)

    def _take_end(self, index: int, life: _Life, how: BaseException | str) -> None:
        """Takes how a process has ended, or how its actor has died."""
        if life.is_over:
            return
        if isinstance(how, self._ray.exceptions.ActorUnavailableError):
            # Cut off, and perhaps alive: it is dead when Ray gives its machine up.
            self._later(_LOOK_AGAIN_S, lambda: self._hold_again(index, life))
            return
        life.is_over = True
        is_kept = isinstance(how, str)
        if not is_kept:
            self._ray.kill(life.actor)
        self._tell(lambda told: told.on_lost(index, f"it died: {how}"))
        delay_s = self._restarts[index].delay_after_loss_s(time.monotonic() - life.since_s)
        if delay_s is not None:
            actor = life.actor if is_kept else None
            self._later(delay_s, lambda: self._start_again(index, actor))
            return
        self._ray.kill(life.actor)
        gone = lost_too_often(f"{self._kind} {index}", how)
        self._tell(lambda told: told.on_given_up(index, gone))

    def _start_again(self, index: int, actor: Any = None) -> None:
        life = self._start(index, actor)
        life.address = self._lives[index].address
        self._lives[index] = life
        life.started.future().add_done_callback(
            lambda _: self._events.put(lambda: self._take_restart(index))
        )

    def _take_restart(self, index: int) -> None:
        life, restarts = self._lives[index], self._restarts[index]
        try:
            self._take_start(index)
        except (RuntimeError, UnavailableError) as error:
            failure = error
            self._ray.kill(life.actor)
            delay_s = restarts.delay_after_failed_start_s()
            if delay_s is None:
                self._tell(lambda told: told.on_given_up(index, failure))
            else:
                self._later(delay_s, lambda: self._start_again(index))
            return
        restarts.started()
        self._hold(index, life)
        self._tell(lambda told: told.on_returned(index, life.address))

    def _tell(self, tell: Callable[[Watchers], None]) -> None:
        if self._watchers is not None:
            self._watchers.tell(tell)


def _connected_ray() -> Any:
    ray = load_ray()
    if not ray.is_initialized():
        raise RuntimeError(
            explain(
                "Processes are to be started by Ray, to which nothing is connected.",
                expected="a connection to a Ray cluster.",
                fix="call start_local_ray().wait() first.",
            )
        )
    return ray


def _placement(resources: Mapping[str, float]) -> dict[str, Any]:
    """Options of an actor; Ray has names of their own for CPUs and GPUs."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": own,
    }
    if not resources:
        options["scheduling_strategy"] = "SPREAD"
    return options

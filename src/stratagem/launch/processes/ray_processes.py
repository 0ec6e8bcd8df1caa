"""Processes placed by Ray: started together, watched, and restarted when they die.

An actor runs each process and restarts it at once. Ray never restarts the actor itself: it would
retry without a delay and report less about a failed start. Instead, a new actor with the same
resources replaces a dead one.
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
from typing import Any, Protocol

from stratagem import settings
from stratagem.environment import load
from stratagem.errors import DeadlineExceededError, UnavailableError, explain, invalid
from stratagem.launch.prefork.fork_server import ServedProcess
from stratagem.launch.processes.local_processes import (
    Restarts,
    Watchers,
    announce_failed_restart,
    cannot_start,
    died_at_start,
    lost_too_often,
    not_started,
    watched_twice,
)
from stratagem.launch.remote.ray_cluster import (
    RayWatch,
    is_ray_lost,
    load_ray,
    watched_addresses,
)
from stratagem.resources import Closing

# One call blocks until the process ends; the others are sequential.
_MAX_CALLS_AT_ONCE = 4
# Limit on closing an object and ending its process.
_CLOSING_S = 5.0
# Delay after losing the connection to a process that may be alive.
_LOOK_AGAIN_S = 0.5


class _Actor(Protocol):
    """Ray's handle of the actor that keeps a process; methods are called by their `remote`."""

    @property
    def start(self) -> Any:
        """Starts the process."""
        ...

    @property
    def hold(self) -> Any:
        """Waits for the end of the process."""
        ...

    @property
    def close(self) -> Any:
        """Closes the served object and ends the process."""
        ...

    @property
    def kill(self) -> Any:
        """Kills the process."""
        ...


@dataclasses.dataclass(eq=False)
class _Life:
    """One process from its start to its death."""

    actor: _Actor
    started: Any
    address: str = ""
    pid: int = 0
    hold: Any = None
    since_s: float = 0.0
    is_over: bool = False


class RayProcesses(Closing):
    """Processes of one kind, on the Ray cluster that this process is connected to.

    `serve` is called in each process with its index and its `arguments`; it returns an object with
    an `address` and a `close()`. `resources` are Ray resources of each process: "CPU", "GPU" and
    custom ones such as {"ps:0": 1}; with None, processes are spread over the machines.
    `environment` is set before JAX is imported. `modules` are imported before a process is forked,
    and not again for a restart. `max_restarts=-1` sets no limit. `first` is the number of the first
    process in names.
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
        first: int = 0,
    ) -> None:
        if resources is not None and len(resources) != len(arguments):
            raise invalid(
                f"{len(arguments)} processes of kind {kind!r} received {len(resources)} resources.",
                expected="resources for each process, or None.",
                fix="pass one mapping per process.",
            )
        self._ray = _connected_ray()
        self._kind, self._first_number = kind, first
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
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap, by time
        self._numbers = itertools.count()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watchers: Watchers | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._ray_watch: RayWatch | None = None
        atexit.register(self.close)

    @property
    def addresses(self) -> list[str]:
        """Addresses by index; see `LocalProcesses.addresses`, with the same errors."""
        limit_s = float(settings.read("join_timeout_s"))
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
        """Process ids, each on its machine."""
        return [one.pid for one in self._lives]

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Restarts processes that die, from now on; waits until all have started.

        See `Watchers`. One thread reports all events, in order. Raises a RuntimeError
        if called twice, or if a process cannot start.
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
        self._ray_watch = RayWatch(
            watched_addresses(), lambda error: self._events.put(lambda: self._lose_ray(error))
        )

    def kill(self, index: int) -> None:
        """Kills a process, for tests."""
        self._lives[index].actor.kill.remote()

    def kill_keeper(self, index: int) -> None:
        """Kills a process and its actor, as a machine failure does; for tests."""
        self._ray.kill(self._lives[index].actor)

    def close(self) -> None:
        """Closes the served objects, then stops the processes."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        atexit.unregister(self.close)
        if self._ray_watch is not None:
            self._ray_watch.close()
        if self._thread is not None:
            self._events.put(lambda: None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        ray = self._ray
        if is_ray_lost() or not ray.is_initialized():  # so its processes end, too
            return
        running = [one for one in self._lives if one.hold is not None]
        self._wait_for([one.actor.close.remote() for one in running])
        for one in self._lives:
            ray.kill(one.actor)
        self._wait_for([one.hold for one in running])

    def _wait_for(self, calls: list[Any]) -> None:
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=_CLOSING_S)

    def _name(self, index: int) -> str:
        return f"{self._kind} {self._first_number + index}"

    def _start(self, index: int, actor: _Actor | None = None) -> _Life:
        """Starts a process, in an existing actor or a new one."""
        actor = actor or self._new_actor(index)
        return _Life(
            actor, actor.start.remote(self._environment, self._modules, self._pickled[index])
        )

    def _new_actor(self, index: int) -> _Actor:
        self._num_starts += 1
        return self._class.options(
            name=f"{self._kind}:{self._first_number + index} {self._cluster}.{self._num_starts}",
            max_restarts=0,
            max_concurrency=_MAX_CALLS_AT_ONCE,
            **_placement(self._resources[index]),
        ).remote(f"{self._kind}:{self._first_number + index}")

    def _take_start(self, index: int) -> None:
        """Records that a process has started, or raises why not."""
        life, name = self._lives[index], self._name(index)
        errors = self._ray.exceptions
        try:
            life.address, life.pid = self._ray.get(life.started)
        except errors.RayTaskError as error:
            if isinstance(error, UnavailableError):  # the actor is alive, its process is not
                raise died_at_start(name, error) from error
            raise cannot_start(name, error) from error
        except errors.RayError as error:
            raise died_at_start(name, error) from error
        life.since_s = time.monotonic()
        life.hold = life.actor.hold.remote()

    def _too_late(self, missing: list[int], limit_s: float) -> DeadlineExceededError:
        names = [
            self._name(index)
            + (f", which needs {dict(of_one)}" if (of_one := self._resources[index]) else "")
            for index in missing
        ]
        return not_started(
            names,
            len(self._lives),
            limit_s,
            expected="machines in the Ray cluster with the resources that each process needs.",
            look_at="start the missing tasks, and check `ray status`",
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
        """Queues an event for the end of a process."""
        life.hold.future().add_done_callback(
            lambda future: self._events.put(
                lambda: self._take_end(index, life, future.exception() or future.result())
            )
        )

    def _hold_again(self, index: int, life: _Life) -> None:
        life.hold = life.actor.hold.remote()
        self._hold(index, life)

    def _take_end(self, index: int, life: _Life, how: BaseException | str) -> None:
        """Handles the end of a process, or the death of its actor."""
        if life.is_over:
            return
        if isinstance(how, self._ray.exceptions.ActorUnavailableError):
            # Disconnected but perhaps alive; it counts as dead once Ray gives up its machine.
            self._later(_LOOK_AGAIN_S, lambda: self._hold_again(index, life))
            return
        life.is_over = True
        is_actor_alive = isinstance(how, str)
        if not is_actor_alive:
            self._ray.kill(life.actor)
        self._report(lambda watchers: watchers.on_lost(index, f"it died: {how}"))
        delay_s = self._restarts[index].delay_after_loss_s(time.monotonic() - life.since_s)
        if delay_s is not None:
            actor = life.actor if is_actor_alive else None
            self._later(delay_s, lambda: self._start_again(index, actor))
            return
        self._ray.kill(life.actor)
        gone = lost_too_often(self._name(index), how)
        self._report(lambda watchers: watchers.on_given_up(index, gone))

    def _start_again(self, index: int, actor: _Actor | None = None) -> None:
        try:
            life = self._start(index, actor)
        except Exception as error:  # noqa: BLE001 - it is tried again
            self._take_failed_start(index, error)
            return
        life.address = self._lives[index].address
        self._lives[index] = life
        life.started.future().add_done_callback(
            lambda _: self._events.put(lambda: self._take_restart(index))
        )

    def _take_restart(self, index: int) -> None:
        life = self._lives[index]
        try:
            self._take_start(index)
        except Exception as error:  # noqa: BLE001 - it is tried again
            self._ray.kill(life.actor)
            self._take_failed_start(index, error)
            return
        self._restarts[index].started()
        self._hold(index, life)
        self._report(lambda watchers: watchers.on_returned(index, life.address))

    def _take_failed_start(self, index: int, error: Exception) -> None:
        delay_s = self._restarts[index].delay_after_failed_start_s()
        if delay_s is None:
            self._report(lambda watchers: watchers.on_given_up(index, error))
        else:
            announce_failed_restart(self._name(index), error, delay_s)
            self._later(delay_s, lambda: self._start_again(index))

    def _lose_ray(self, error: Exception) -> None:
        """Gives up all processes: nothing can restart or stop them without Ray."""
        self._due.clear()
        for index, life in enumerate(self._lives):
            life.is_over = True
            self._report(lambda watchers, index=index: watchers.on_lost(index, str(error)))
            self._report(lambda watchers, index=index: watchers.on_given_up(index, error))

    def _report(self, event: Callable[[Watchers], None]) -> None:
        if self._watchers is not None:
            self._watchers.report(event)


def _connected_ray() -> Any:
    ray = load_ray()
    if not ray.is_initialized():
        raise RuntimeError(
            explain(
                "Processes cannot start: this process is not connected to Ray.",
                expected="a connection to a Ray cluster.",
                fix="call RayCluster().wait() first.",
            )
        )
    return ray


def _placement(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns actor options; Ray passes CPUs and GPUs separately from other resources."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": own,
    }
    if not resources:
        options["scheduling_strategy"] = "SPREAD"
    return options

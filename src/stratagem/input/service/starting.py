"""`start`: a dispatcher in this process, and input workers on this machine or by Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem import environment
from stratagem.errors import UnavailableError, explain, report_error
from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
from stratagem.input.service.processes import InputWorkers
from stratagem.launch.remote.ray.ray_cluster import (
    is_connected,
    load_ray,
    own_host,
    start_local_ray,
)
from stratagem.resources import Closing

# Number of input workers that trainers need, from their waits and the rates of the workers.
#
# No sockets and no clock here: times are arguments.
#
# Source: TF 2.21 data/service/auto_scaler.cc: sum of the rates of consumption, by the mean rate of
# a
# worker.

# Part of its time that a trainer may wait without more workers.
_WAIT_SHARE = 0.05
# Part of its capacity that the service keeps free when it shrinks.
_SPARE_SHARE = 0.1
# Seconds with too many workers before one of them ends.
_QUIET_S = 60.0


@dataclasses.dataclass(frozen=True)
class TrainerWait:
    """Batches that a trainer took in a time, and its seconds with and without waiting for them."""

    num_batches: int
    busy_s: float
    wait_s: float

    @property
    def rate(self) -> float:
        """Batches per second that it would take without waiting; infinite if it only waited."""
        if self.busy_s > 0:
            return self.num_batches / self.busy_s
        return math.inf if self.wait_s else 0.0

    @property
    def is_starved(self) -> bool:
        """True if it waits for more than a small part of its time."""
        return self.wait_s > _WAIT_SHARE * (self.busy_s + self.wait_s)


@dataclasses.dataclass(frozen=True)
class Load:
    """Batches per second that each worker can read, and the waits of trainers."""

    rates: Sequence[float]
    waits: Sequence[TrainerWait]


def workers_wanted(
    rates: Sequence[float], waits: Sequence[TrainerWait], current: int, least: int, most: int
) -> int:
    """Returns the number of workers that trainers need: at most one more or less than now.

    Example:
        >>> starved = TrainerWait(num_batches=10, busy_s=1.0, wait_s=9.0)  # 10 in a second
        >>> workers_wanted([2.0], [starved], current=1, least=1, most=8)
        2
    """
    consumed = sum(wait.rate for wait in waits)
    is_starved = any(wait.is_starved for wait in waits)
    mean = sum(rates) / len(rates) if rates else 0.0
    if is_starved and rates and consumed > current * mean:
        wanted = current + 1
    elif not is_starved and consumed <= (1 - _SPARE_SHARE) * (current - 1) * mean:
        wanted = current - 1
    else:
        wanted = current
    return max(least, min(most, wanted))


class Scaler:
    """Decides on the number of workers; fewer only after a quiet time."""

    def __init__(self, least: int, most: int, quiet_s: float = _QUIET_S) -> None:
        self._least = least
        self._most = most
        self._quiet_s = quiet_s
        self._quiet_since_s: float | None = None

    def decide(self, load: Load, current: int, now_s: float) -> int:
        """Returns the number of workers to have now."""
        wanted = workers_wanted(load.rates, load.waits, current, self._least, self._most)
        if wanted >= current:
            self._quiet_since_s = None
            return wanted
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s < self._quiet_since_s + self._quiet_s:
            return current
        self._quiet_since_s = now_s
        return wanted


def load_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Load:
    """Returns the load between two results of `DispatchServer.describe`.

    Jobs with ShardingPolicy.OFF do not count: each of their workers reads all data.
    """
    earlier = before["workers"]
    rates = [
        num_read / read_s
        for address, worker in after["workers"].items()
        if address in earlier
        and (num_read := worker["num_read"] - earlier[address]["num_read"]) > 0
        and (read_s := worker["read_s"] - earlier[address]["read_s"]) > 0
    ]
    known = _consumers(before)
    waits = [
        TrainerWait(
            consumer["num_batches"] - known[name]["num_batches"],
            max(0.0, consumer["age_s"] - known[name]["age_s"] - wait_s),
            wait_s,
        )
        for name, consumer in _consumers(after).items()
        if name in known
        for wait_s in [consumer["wait_s"] - known[name]["wait_s"]]
    ]
    return Load(rates, waits)


def _consumers(described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: consumer
        for job in described["jobs"]
        if job["policy"] != "OFF"
        for name, consumer in job["consumers"].items()
    }


# Interval of measurements and decisions.
_SCALING_S = 3.0


class InputService(Closing):
    """A dispatcher and its workers, made by `start`; a context manager.

    Args:
        config: settings of the dispatcher.
        num_workers: number of workers at first.
        scaler: decides on the number of workers; None keeps it.
        on_ray: places the workers by Ray, which this process is connected to.

    Raises:
        OSError: the port is taken, or the journal cannot be written.
        RuntimeError: a worker cannot start.
        UnavailableError: a worker has died at its start.

    Example:
        >>> config = sg.input.service.DispatcherConfig()
        >>> with sg.input.service.InputService(config, 0) as service:  # workers may join later
        ...     service.num_workers
        0

    Source: specific to Stratagem.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        num_workers: int,
        *,
        scaler: Scaler | None = None,
        on_ray: bool = False,
    ) -> None:
        self._is_closed = threading.Event()
        self._scaling: threading.Thread | None = None
        with contextlib.ExitStack() as stack:
            self._dispatcher = stack.enter_context(DispatchServer(config))
            # After the end of the workers, which it may wait for.
            stack.callback(self._join_scaling)
            self._workers = stack.enter_context(
                InputWorkers(
                    self._dispatcher.target,
                    num_workers,
                    on_ray=on_ray,
                    host=None if on_ray else config.host,
                )
            )
            if scaler is not None:
                self._scaling = threading.Thread(
                    target=self._scale, args=(scaler,), name="input scaling", daemon=True
                )
                self._scaling.start()
            stack.callback(self._is_closed.set)
            self._closing = stack.pop_all()

    @property
    def target(self) -> str:
        """Address for `distribute`, as `tcp://host:port`."""
        return self._dispatcher.target

    @property
    def num_workers(self) -> int:
        """Number of workers now."""
        return self._workers.count

    def describe(self) -> dict[str, Any]:
        """Returns the workers and jobs as JSON, see `DispatchServer.describe`."""
        return self._dispatcher.describe()

    def _scale(self, scaler: Scaler) -> None:
        before = self.describe()
        while not self._is_closed.wait(_SCALING_S):
            after = self.describe()
            current = self._workers.count
            wanted = scaler.decide(load_between(before, after), current, time.monotonic())
            try:
                if wanted > current:
                    self._workers.add()
                elif wanted < current:
                    self._workers.remove()
            except (RuntimeError, UnavailableError) as error:
                report_error(error)
            before = after if wanted == current else self.describe()

    def _join_scaling(self) -> None:
        if self._scaling is not None:
            self._scaling.join()

    def close(self) -> None:
        """Stops the workers, then the dispatcher."""
        self._closing.close()


def start(
    num_workers: int, *, min_workers: int | None = None, max_workers: int | None = None
) -> InputService:
    """Starts a dispatcher and input workers, which are restarted when they die.

    The workers are processes of this machine. If this process is connected to Ray, or `RAY_ADDRESS`
    is set, Ray spreads them over its machines. The dispatcher is part of this process.

    Args:
        num_workers: number of workers at first.
        min_workers: least number of workers: one ends after each minute in which trainers need
            fewer. None for `num_workers`.
        max_workers: largest number: one is added every few seconds while trainers wait for data.
            None for `num_workers`.

    Returns:
        The running service, to use in a `with` block; its `target` is the address for `distribute`.

    Raises:
        RuntimeError: a worker cannot start, because of an error in it.
        UnavailableError: a worker has died at its start, or Ray does not answer.
        ValueError: numbers below 1 or out of order, or Ray has several machines and the run has no
            secret.

    Example:
        >>> with sg.input.service.start(2) as service:
        ...     distribute = sg.input.service.distribute("distributed_epoch", service.target)
        ...     dataset = sg.input.Dataset(np.arange(6), batch_size=2).apply(distribute)
        ...     print(sorted(batch.tolist() for batch in dataset))
        [[0, 1], [2, 3], [4, 5]]

    Source: specific to Stratagem.
    """
    scaler = scaler_of(num_workers, min_workers, max_workers)
    if environment.lookup("RAY_ADDRESS") is None and not is_connected():
        return InputService(DispatcherConfig(), num_workers, scaler=scaler)
    start_local_ray().wait()
    is_one = sum(node["Alive"] for node in load_ray().nodes()) == 1
    config = DispatcherConfig(host="127.0.0.1" if is_one else own_host())
    return InputService(config, num_workers, scaler=scaler, on_ray=True)


def scaler_of(num_workers: int, min_workers: int | None, max_workers: int | None) -> Scaler | None:
    """Returns what decides on the number of workers, None if it stays.

    Raises ValueError for numbers below 1 or out of order.
    """
    least = num_workers if min_workers is None else min_workers
    most = num_workers if max_workers is None else max_workers
    if not 1 <= least <= num_workers <= most:
        raise ValueError(
            explain(
                f"min_workers={min_workers}, num_workers={num_workers} and "
                f"max_workers={max_workers} are out of range.",
                expected="1 <= min_workers <= num_workers <= max_workers.",
                fix="pass the number of processes that read the data, and its limits.",
            )
        )
    return Scaler(least, most) if least < most else None

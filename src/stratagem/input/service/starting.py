"""`start`: a dispatcher in this process, and input workers on this machine or by Ray."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from stratagem import environment
from stratagem.background_errors import report_error
from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
from stratagem.input.service.processes import InputWorkers
from stratagem.input.service.scaling import Scaler, load_between
from stratagem.launch.remote.ray.ray_cluster import (
    is_connected,
    load_ray,
    own_host,
    start_local_ray,
)
from stratagem.messages import explain

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

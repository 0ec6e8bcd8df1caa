"""`start`: a dispatcher in this process, and input workers on this machine or by Ray."""

from __future__ import annotations

import contextlib
from typing import Any

from stratagem import environment
from stratagem.closing import Closing
from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
from stratagem.input.service.processes import InputWorkers
from stratagem.messages import explain
from stratagem.remote.ray.ray_cluster import is_connected, load_ray, own_host, start_local_ray

__all__ = ["InputService", "start"]


class InputService(Closing):
    """A dispatcher and its workers, made by `start`; a context manager.

    Args:
        config: settings of the dispatcher.
        num_workers: number of workers at first.
        on_ray: places the workers by Ray, which this process is connected to.

    Raises:
        OSError: the port is taken, or the journal cannot be written.
        RuntimeError: a worker cannot start.
        UnavailableError: a worker has died at its start.

    Source: specific to Stratagem.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        num_workers: int,
        *,
        on_ray: bool = False,
    ) -> None:
        with contextlib.ExitStack() as stack:
            self._dispatcher = stack.enter_context(DispatchServer(config))
            self._workers = stack.enter_context(
                InputWorkers(
                    self._dispatcher.target,
                    num_workers,
                    on_ray=on_ray,
                    host=None if on_ray else config.host,
                )
            )
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

    def close(self) -> None:
        """Stops the workers, then the dispatcher."""
        self._closing.close()


def start(num_workers: int) -> InputService:
    """Starts a dispatcher and input workers, which are restarted when they die.

    The workers are processes of this machine. If this process is connected to Ray, or `RAY_ADDRESS`
    is set, Ray spreads them over its machines. The dispatcher is part of this process.

    Args:
        num_workers: number of workers.

    Returns:
        The running service, to use in a `with` block; its `target` is the address for `distribute`.

    Raises:
        RuntimeError: a worker cannot start, because of an error in it.
        UnavailableError: a worker has died at its start, or Ray does not answer.
        ValueError: a number below 1, or Ray has several machines and the run has no secret.

    Example:
        >>> with sg.input.service.start(2) as service:
        ...     distribute = sg.input.service.distribute("distributed_epoch", service.target)
        ...     dataset = sg.input.Dataset(np.arange(6), batch_size=2).apply(distribute)
        ...     print(sorted(batch.tolist() for batch in dataset))
        [[0, 1], [2, 3], [4, 5]]

    Source: specific to Stratagem.
    """
    check_num_workers(num_workers)
    if environment.lookup("RAY_ADDRESS") is None and not is_connected():
        return InputService(DispatcherConfig(), num_workers)
    start_local_ray().wait()
    is_one = sum(node["Alive"] for node in load_ray().nodes()) == 1
    config = DispatcherConfig(host="127.0.0.1" if is_one else own_host())
    return InputService(config, num_workers, on_ray=True)


def check_num_workers(num_workers: int) -> None:
    """Raises ValueError for a number of workers below 1."""
    if num_workers < 1:
        raise ValueError(
            explain(
                f"num_workers={num_workers} is out of range.",
                expected="1 or more input workers.",
                fix="pass the number of processes that read the data.",
            )
        )

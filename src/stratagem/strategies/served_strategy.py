"""What a strategy with parameter servers is, on the coordinator and on workers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from stratagem.messages import explain
from stratagem.options import RunOptions
from stratagem.partitioners import Partitioner
from stratagem.servers import ASYNCHRONOUS, Connections, Placer, ServedVariables, UpdateMode
from stratagem.servers.closing import Closing
from stratagem.strategies.coordinator_options import CoordinatorOptions
from stratagem.strategies.served_cluster import Cluster
from stratagem.strategies.served_steps import ServedSteps
from stratagem.strategies.served_worker import begin_on_worker, connected
from stratagem.strategies.serving import Serving
from stratagem.strategies.some_tasks import OfSomeTasks
from stratagem.topology import Topology, local_devices
from stratagem.topology.devices import DeviceLike

__all__ = ["ServedStrategy"]


class ServedStrategy(OfSomeTasks, Closing):
    """A strategy whose variables are on parameter servers.

    Made by one of its class methods, or as a `ParameterServerStrategy`.

    `serving` reads and changes variables; `coordinator` is the `ClusterCoordinator`, once there is
    one; `limits` are the options of both, in the coordinator.
    `place` is which of how many workers with programs of their own this is.
    """

    serves_all = True
    limits: CoordinatorOptions
    place: tuple[int, int] = (0, 1)
    cluster: Cluster
    serving: Serving
    _connections: Connections | None = None

    @classmethod
    def on_cluster(cls, cluster: Cluster, **arguments: Any) -> ServedStrategy:
        """Returns a strategy on servers that run already.

        Args:
            cluster: the cluster; closing the strategy closes it.
            **arguments: of `begin`.
        """
        made = object.__new__(cls)
        made.begin(cluster, **arguments)
        return made

    def begin(
        self,
        cluster: Cluster,
        variable_partitioner: Partitioner | None = None,
        mode: UpdateMode = ASYNCHRONOUS,
        options: CoordinatorOptions | None = None,
    ) -> None:
        """Takes its place in a cluster, as its coordinator.

        Args:
            cluster: the cluster.
            variable_partitioner: which variables are split; None for none.
            mode: when the servers apply gradients.
            options: limits; None for the defaults.
        """
        self.limits = options or CoordinatorOptions()
        super().__init__(Topology(local_devices()[:1]))
        self.cluster = cluster
        self.schedules = True
        self.coordinator: Any = None
        self._connections = connected(cluster, self.limits.recovery_timeout_s)
        cluster.tell_moves_to(self._connections.move)
        client = ServedVariables(self._connections)
        placer = Placer(len(cluster.server_addresses), variable_partitioner)
        self.serving: Serving = Serving(
            client, placer, mode, has_journals=cluster.has_journals, is_coordinator=True
        )
        self.exchange = ServedSteps(self.serving, 1)

    @classmethod
    def of_worker(
        cls,
        client: ServedVariables,
        index: int,
        mode: UpdateMode,
        devices: Sequence[DeviceLike] | None = None,
    ) -> ServedStrategy:
        """Returns the strategy as a worker has it.

        Args:
            client: of the servers.
            index: of the worker.
            mode: when the servers apply gradients.
            devices: of its replicas; None for all local ones.
        """
        made = object.__new__(cls)
        begin_on_worker(made, client, index, mode, devices=devices)
        return made

    def __repr__(self) -> str:
        if self.absent_task is not None:
            return f"{type(self).__name__} of other tasks than {self.absent_task}"
        if not self.schedules:
            return f"{super().__repr__()} of a worker"
        return f"{type(self).__name__}({len(self.cluster.server_addresses)} servers)"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(
            explain(
                f"{self} was given to copy.deepcopy.",
                expected="one strategy for a cluster: its servers hold each variable once.",
                fix="use the strategy itself.",
            )
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls a function once a replica; see `Strategy.run`. Warns in the coordinator."""
        self.require_present()
        if self.schedules:
            warnings.warn(
                explain(
                    "strategy.run was called in the coordinator, and runs there.",
                    expected="functions that run on workers.",
                    fix="call it in a function that is given to ClusterCoordinator.schedule.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )
        return super().run(fn, args, kwargs, options)

    def close(self) -> None:
        """Ends the workers and the servers, with all that they hold."""
        if self._connections is None:  # a worker's, which the worker closes
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self._connections.close)
            if self.coordinator is not None:
                stack.callback(self.coordinator.close)

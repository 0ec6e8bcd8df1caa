"""Variables on parameter servers, which workers read and update independently of one another."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, final

from stratagem.messages import explain
from stratagem.options import RunOptions
from stratagem.partitioners import Partitioner
from stratagem.servers import ClusterKeys, Connections, Placer, ServedVariables, UpdateMode
from stratagem.servers.closing import Closing
from stratagem.strategies.served_steps import ServedSteps
from stratagem.strategies.serving import Serving
from stratagem.strategies.strategy import Strategy
from stratagem.topology import Topology, find_devices, local_devices
from stratagem.topology.devices import DeviceLike

__all__ = ["Cluster", "ParameterServerStrategy", "Processes"]


class Processes(Protocol):
    """Processes of one kind, each with an address."""

    @property
    def addresses(self) -> list[str]:
        """Theirs, in their order."""
        ...

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Starts processes again that die.

        Args:
            on_lost: called with the index of one that has died, and why.
            on_returned: called with its index, and its new address.
            on_given_up: called with its index when it is not started any more, and why.
        """
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class Cluster(Protocol):
    """Servers that run, and workers that can be started."""

    @property
    def keys(self) -> ClusterKeys:
        """Those of the cluster."""
        ...

    @property
    def server_addresses(self) -> list[str]:
        """Where the servers are, in their order."""
        ...

    def locate_server(self, server: int) -> str | None:
        """Returns where a server is now, one that was started again too; None if not known."""
        ...

    def start_workers(self, serve: Callable[..., Any]) -> Processes:
        """Starts the workers.

        Args:
            serve: called in each with its index and the keys; returns what has an address.
        """
        ...

    def close(self) -> None:
        """Ends the servers."""
        ...


@final
class ParameterServerStrategy(Strategy, Closing):
    """Keeps variables on parameter servers, where workers read and update them independently.

    The process that makes it is the coordinator: Keras's `fit` deals batches out to the workers,
    and `sg.coordinator.ClusterCoordinator` schedules functions of your own.

    Source: TF 2.21 parameter_server_strategy_v2.py, ParameterServerStrategyV2.
    """

    def __init__(
        self,
        cluster: Cluster,
        variable_partitioner: Partitioner | None = None,
        *,
        synchronous: bool = False,
        backup_workers: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(Topology(local_devices()[:1]))
        self.cluster = cluster
        self.schedules = True
        self.coordinator: Any = None
        self._connections = Connections(
            cluster.keys, cluster.server_addresses, locate=cluster.locate_server
        )
        placer = Placer(len(cluster.server_addresses), variable_partitioner)
        mode = UpdateMode(max_staleness=max_staleness)
        self.serving: Serving = Serving(ServedVariables(self._connections), placer, mode)
        self.exchange = ServedSteps(self.serving, 1)

    @classmethod
    def of_worker(
        cls,
        client: ServedVariables,
        index: int,
        mode: UpdateMode,
        devices: Sequence[DeviceLike] | None = None,
    ) -> ParameterServerStrategy:
        """Returns the strategy as a worker has it.

        Args:
            client: of the servers.
            index: of the worker.
            mode: when the servers apply gradients.
            devices: of its replicas; None for all local ones.
        """
        made = object.__new__(cls)
        found = local_devices() if devices is None else find_devices(list(devices))
        Strategy.__init__(made, Topology(found))
        made.coordinator = None
        made.serving = Serving(client, None, mode)
        made.exchange = ServedSteps(
            made.serving,
            made.num_replicas_in_sync,
            repeats_stale=mode.max_staleness is not None,
        )
        made.first_replica_id = index * made.num_replicas_in_sync
        return made

    def __repr__(self) -> str:
        if not self.schedules:
            return f"ParameterServerStrategy(worker, {super().__repr__()})"
        return f"ParameterServerStrategy({len(self.cluster.server_addresses)} servers)"

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
        if not self.schedules:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self._connections.close)
            if self.coordinator is not None:
                stack.callback(self.coordinator.close)

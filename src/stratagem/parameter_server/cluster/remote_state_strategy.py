"""Base of strategies with variables on parameter servers, in any process of the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.programs.lockstep import Executor, Lockstep
from stratagem.group.transport.connection import Connections
from stratagem.parameter_server.cluster.cluster_plan import Cluster, CoordinatorOptions
from stratagem.resources import Closing
from stratagem.strategies.strategy import NonTraining, Strategy
from stratagem.variables.placement import Replicated


@dataclasses.dataclass
class ProcessParts:
    """Topology, placement and executor of one process, and its connections."""

    topology: Topology
    placement: Replicated
    executor: Callable[[Any], Executor] = Lockstep
    cluster: Cluster | None = None
    connections: Connections | None = None


class RemoteStateStrategy(Strategy, Closing):
    """Strategy with variables on parameter servers: a coordinator's, or one of its workers'.

    `limits=None` selects the default `CoordinatorOptions`.
    """

    executor: Executor

    def __init__(self, parts: ProcessParts, limits: CoordinatorOptions | None = None) -> None:
        super().__init__(parts.topology, placement=parts.placement, executor=parts.executor)
        self.limits = limits or CoordinatorOptions()
        self._cluster = parts.cluster
        self._connections = parts.connections

    @property
    def cluster(self) -> Cluster:
        """The running servers. Only in a process that started or joined them."""
        assert self._cluster is not None
        return self._cluster

    def __repr__(self) -> str:
        name = type(self).__name__
        if isinstance(self.executor, NonTraining):
            return f"{name} of other tasks than {self.executor.task}"
        if not self.executor.schedules:
            return f"{super().__repr__()} of a worker"
        return f"{name}({len(self.cluster.server_addresses)} servers)"

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise ValueError(
            explain(
                f"{self} was passed to copy.deepcopy, which cannot copy it.",
                expected="one strategy per cluster: its servers store each variable once.",
                fix="use the strategy itself.",
            )
        )

    def close(self) -> None:
        """Stops the workers and the servers, and discards the variables."""
        if self._connections is None:  # A coordinator's worker closes its connections itself.
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self._connections.close)
            stack.callback(self.executor.close)

"""The servers and workers of a cluster, which are watched and started again when they die.

On this machine they are forked; in a cluster of several machines Ray places them.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from stratagem import config, environment
from stratagem.closing import Closing
from stratagem.cluster import ClusterSpec
from stratagem.launch.prefork.served_process import HOST_VARIABLE
from stratagem.parameter_server.cluster.cluster_plan import ClusterPlan, EntryPoints
from stratagem.parameter_server.cluster.local_processes import LocalProcesses, SharedStandby
from stratagem.parameter_server.cluster.placing import Placing
from stratagem.parameter_server.cluster.ray_processes import RayProcesses
from stratagem.parameter_server.transport.keys import ClusterKeys
from stratagem.remote.ray.leader import leader_of
from stratagem.remote.ray.ray_cluster import is_connected, start_local_ray
from stratagem.remote.ray.ray_nodes import RayNode, start_head

__all__ = ["CoordinatedCluster"]

# Servers compute on the host: accelerators are for workers.
_OF_SERVERS = {"JAX_PLATFORMS": "cpu", "TF_CONFIG": ""}
_OF_WORKERS = {"TF_CONFIG": ""}
# On this machine the accelerators are this process's own, and nobody else reaches the others.
_OF_LOCAL = {"JAX_PLATFORMS": "cpu", "TF_CONFIG": "", HOST_VARIABLE: "127.0.0.1"}
# What both need; of what is here a process that was killed is forked again.
_MODULES = (
    "cloudpickle",
    "zmq",
    "stratagem.keras",
    "stratagem.parameter_server.strategy.entry_points",
)


class CoordinatedCluster(Closing):
    """Starts the servers of a cluster, and its workers when they are asked for.

    Args:
        plan: number of processes, and their machines.
        entry_points: start a server and a worker in their processes.

    Raises:
        ImportError: pyzmq or cloudpickle is not installed, or Ray for a cluster of machines.
        DeadlineExceededError: not all tasks came in time.
        RuntimeError: a server cannot start.
    """

    has_journals = True

    def __init__(self, plan: ClusterPlan, entry_points: EntryPoints) -> None:
        self.keys = ClusterKeys.make()
        self._entry_points = entry_points
        self._plan = plan
        self._on_moved: list[Callable[[int, str], None]] = []
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._standby: SharedStandby | None = None
            if _is_local(plan):
                variables = {**environment.snapshot(), **_OF_LOCAL}
                self._standby = stack.enter_context(SharedStandby(_MODULES, variables))
                self._placing = Placing.here()
            else:
                self._placing = _connect(plan, stack)
            server = (self.keys, self._journal_dir(stack), plan.journal_interval_s)
            self.servers = stack.enter_context(
                self._start("ps", entry_points.server, [server] * plan.num_servers)
            )
            self._addresses: list[str | None] = list(self.servers.addresses)
            self.server_addresses = self.servers.addresses
            self.servers.watch(self._lose, self._find, self._give_up)
            self._closing = stack.pop_all()

    def locate_server(self, server: int) -> str | None:
        """Returns where a server is now; None where it is not known.

        Args:
            server: its index.
        """
        return self._addresses[server]

    def tell_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Has a function called with the index and the new address of a server that has moved."""
        self._on_moved.append(on_moved)

    def start_workers(self) -> LocalProcesses | RayProcesses:
        """Starts the workers."""
        serve = self._entry_points.worker
        workers = self._start("worker", serve, [(self.keys,)] * self._plan.num_workers)
        return self._closing.enter_context(workers)

    def close(self) -> None:
        """Ends all processes that were started here."""
        self._closing.close()

    def _start(
        self, kind: str, serve: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> LocalProcesses | RayProcesses:
        """Starts the servers or the workers, and does not wait for them."""
        count = len(arguments)
        threads = self._placing.threads(count)
        if self._standby is not None:
            return LocalProcesses(kind, serve, arguments, standby=self._standby, variables=threads)
        is_server = kind == "ps"
        own, resources = (
            (_OF_SERVERS, self._placing.of_servers(count))
            if is_server
            else (_OF_WORKERS, self._placing.of_workers(count))
        )
        return RayProcesses(
            kind,
            serve,
            arguments,
            resources=resources,
            environment={**own, **threads},
            modules=_MODULES,
        )

    def _journal_dir(self, stack: contextlib.ExitStack) -> str:
        """The folder of the journals, on the machine of each server."""
        if self._plan.journal_dir is not None:
            return self._plan.journal_dir
        if self._plan.spec is None:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix="stratagem-journals-"))
        run = hashlib.sha256(self.keys.server_public).hexdigest()[:16]
        return str(config.cache_dir() / "journals" / run)

    def _lose(self, server: int, reason: str) -> None:
        self._addresses[server] = None

    def _find(self, server: int, address: str) -> None:
        self._addresses[server] = address
        for on_moved in self._on_moved:
            on_moved(server, address)

    def _give_up(self, server: int, error: Exception) -> None:
        self._addresses[server] = None


def _is_local(plan: ClusterPlan) -> bool:
    """Returns whether neither TF_CONFIG nor a connection to Ray names another machine."""
    return plan.spec is None and environment.lookup("RAY_ADDRESS") is None and not is_connected()


def _connect(plan: ClusterPlan, stack: contextlib.ExitStack) -> Placing:
    """Connects to the Ray cluster of the plan, whose head is started here if it is new."""
    head_address = None
    if plan.spec is not None and environment.lookup("RAY_ADDRESS") is None:
        head_address = stack.enter_context(_head(plan.spec)).head_address
    count = plan.num_workers + plan.num_servers
    ray = stack.enter_context(start_local_ray(head_address, num_processes=count))
    ray.wait()
    return Placing.now(plan.spec, is_own=ray.started_here)


def _head(spec: ClusterSpec) -> RayNode:
    """Starts Ray's head at the address of the leader, which is this process."""
    task_type, task_index = leader = leader_of(spec)
    return start_head(spec.task_address(*leader), task_type=task_type, task_index=task_index)

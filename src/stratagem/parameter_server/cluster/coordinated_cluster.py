"""Servers and workers of a coordinator, restarted when they die.

On this machine they are forked; in a cluster of several machines Ray places them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from stratagem import config, environment
from stratagem.closing import Closing
from stratagem.cluster.spec import ClusterSpec
from stratagem.group.transport.keys import ClusterKeys
from stratagem.launch.prefork.served_process import HOST_VARIABLE
from stratagem.launch.processes.local_processes import LocalProcesses, SharedStandby
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.launch.remote.ray.leader import leader_of
from stratagem.launch.remote.ray.node_process import RayNode
from stratagem.launch.remote.ray.ray_cluster import is_connected, start_local_ray
from stratagem.launch.remote.ray.ray_nodes import start_head
from stratagem.parameter_server.cluster.cluster_plan import ClusterPlan, EntryPoints, JournalPlan
from stratagem.parameter_server.cluster.placing import Placing
from stratagem.temporary_folders import TemporaryFolder

# Servers compute on the host; workers use the accelerators.
_NO_CLUSTER = {"TF_CONFIG": "", "STRATAGEM_SLURM_JOBS": ""}
_OF_SERVERS = {"JAX_PLATFORMS": "cpu", **_NO_CLUSTER}
_OF_WORKERS = _NO_CLUSTER
# On this machine accelerators belong to the coordinator, and only local processes connect.
_OF_LOCAL = {"JAX_PLATFORMS": "cpu", **_NO_CLUSTER, HOST_VARIABLE: "127.0.0.1"}
# Imported once, before a process is forked, so that a restart does not import again.
_MODULES = (
    "cloudpickle",
    "zmq",
    "stratagem.keras",
    "stratagem.parameter_server.strategy.entry_points",
)


class CoordinatedCluster(Closing):
    """Starts the servers of a cluster, and its workers on request.

    Raises a DeadlineExceededError if tasks do not join in time, a RuntimeError if a server cannot
    start.
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
            server = (self.keys, self._journals(stack))
            self.servers = stack.enter_context(
                self._start("ps", entry_points.server, [server] * plan.num_servers)
            )
            self._addresses: list[str | None] = list(self.servers.addresses)
            self.server_addresses = self.servers.addresses
            self.servers.watch(self._lose, self._find, self._give_up)
            self._closing = stack.pop_all()

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        return self._addresses[server]

    def report_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Registers a function to call with the index and new address of a restarted server."""
        self._on_moved.append(on_moved)

    def start_workers(self) -> LocalProcesses | RayProcesses:
        """Starts the workers."""
        serve = self._entry_points.worker
        workers = self._start("worker", serve, [(self.keys,)] * self._plan.num_workers)
        return self._closing.enter_context(workers)

    def close(self) -> None:
        """Stops all processes of the cluster."""
        self._closing.close()

    def _start(
        self, kind: str, serve: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> LocalProcesses | RayProcesses:
        """Starts the servers or the workers without waiting for them."""
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

    def _journals(self, stack: contextlib.ExitStack) -> JournalPlan:
        """Returns the plan of journals; the folder is a path on the machine of each server."""
        plan, is_temporary = self._plan, False
        folder = plan.journal_dir
        if folder is None and plan.spec is None:
            folder = str(stack.enter_context(TemporaryFolder("stratagem-journals-")).path)
        elif folder is None:
            run = hashlib.sha256(self.keys.server_public).hexdigest()[:16]
            folder, is_temporary = str(config.cache_dir() / "journals" / run), True
        return JournalPlan(
            folder,
            plan.journal_interval_s,
            is_durable=plan.durable_updates,
            is_temporary=is_temporary,
        )

    def _lose(self, server: int, reason: str) -> None:
        self._addresses[server] = None

    def _find(self, server: int, address: str) -> None:
        self._addresses[server] = address
        for on_moved in self._on_moved:
            on_moved(server, address)

    def _give_up(self, server: int, error: Exception) -> None:
        self._addresses[server] = None


def _is_local(plan: ClusterPlan) -> bool:
    """Returns True if neither TF_CONFIG nor a Ray connection refers to another machine."""
    return plan.spec is None and environment.lookup("RAY_ADDRESS") is None and not is_connected()


def _connect(plan: ClusterPlan, stack: contextlib.ExitStack) -> Placing:
    """Connects to the Ray cluster of the plan; starts its head here if it is new."""
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

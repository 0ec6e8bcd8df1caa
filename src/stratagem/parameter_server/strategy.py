"""Parts of a parameter-server strategy in the coordinator, workers and other tasks."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax

from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import id_in_cluster
from stratagem.devices.finding import DeviceLike, find_devices, local_devices, refuse_to_plan
from stratagem.devices.mesh import Topology
from stratagem.errors import UnavailableError, invalid, report_error
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.journal import sweep_journals
from stratagem.launch.remote.ray_cluster import own_host
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.remote_steps import RemoteSteps
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.client.variable_client import VariableClient
from stratagem.parameter_server.cluster_plan import (
    Cluster,
    ClusterPlan,
    CoordinatorOptions,
    JournalPlan,
    ProcessParts,
    RemoteStateStrategy,
    check_counts,
    checked_cluster,
    checked_options,
    is_non_training,
    refuse_numbers,
    update_mode,
)
from stratagem.parameter_server.clusters import CoordinatedCluster, SharedCluster
from stratagem.parameter_server.coordinator.shipping import Scheduling
from stratagem.parameter_server.coordinator.worker import Worker
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.keras.server_keras import ServerKeras
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.server.changes import LostUpdates
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.shards import ASYNCHRONOUS, UpdateMode
from stratagem.resources import Closing
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.membership import copy_refused, local_topology, parameter_device_of
from stratagem.strategies.placement import (
    CENTRAL,
    SERVER,
    PlacementRules,
    check_rules,
    places_on_replicas,
)
from stratagem.strategies.strategy import NonTraining, Strategy, recreatable
from stratagem.variables.placement import Replicated, SingleDeviceStore


class RemotePlacement(Replicated):
    """All variables on parameter servers."""

    is_remote = True

    def __init__(self, remote: RemoteSteps) -> None:
        super().__init__()
        self.remote = remote


class IndependentWorker(Lockstep):
    """Executor of a worker that runs its own program."""

    def __init__(self, strategy: Strategy, worker: tuple[int, int]) -> None:
        super().__init__(strategy)
        self.worker = worker


def connect(cluster: Cluster, silence_s: float | None) -> Connections:
    """Connects to the servers, lost after `silence_s` without a reply; None for the default."""
    addresses, locate = cluster.server_addresses, cluster.locate_server
    return Connections(cluster.keys, addresses, locate=locate, silence_s=silence_s)


def coordinator_parts(
    cluster: Cluster,
    partitioner: Partitioner | None,
    mode: UpdateMode,
    silence_s: float | None,
) -> ProcessParts:
    """Returns the parts of the coordinator, which creates all variables."""
    connections = connect(cluster, silence_s)
    client = ServerClient(connections)
    cluster.report_moves_to(connections.move, connections.abandon)
    cluster.report_moves_to(functools.partial(_send_rules_again, client))
    variables = VariableClient(
        client,
        ShardPlacer(len(cluster.server_addresses), partitioner),
        mode,
        is_coordinator=True,
    )
    return ProcessParts(
        Topology(local_devices()[:1]),
        RemotePlacement(_steps(variables, 1)),
        functools.partial(Scheduling, packing=KERAS_PACKING),
        cluster,
        connections,
    )


def _steps(variables: VariableClient, num_replicas: int) -> RemoteSteps:
    """Returns what runs the steps of a process."""
    mode, keras = variables.mode, ServerKeras()
    repeats_stale = mode.max_staleness is not None
    return RemoteSteps(variables, num_replicas, keras=keras, repeats_stale=repeats_stale)


def _send_rules_again(client: ServerClient, server: int, address: str) -> None:
    """Sends the optimizers to a restarted server, on which workers may already wait for them."""

    def send() -> None:
        try:
            client.send_rules_again(server)
        except UnavailableError:
            pass  # lost again: its next return sends them again
        except Exception as error:  # noqa: BLE001 - workers get an UnavailableError
            report_error(error)

    threading.Thread(target=send, name=f"optimizers of server {server}", daemon=True).start()


def worker_parts(
    client: ServerClient,
    index: int,
    mode: UpdateMode,
    devices: Sequence[DeviceLike] | None = None,
    *,
    placer: ShardPlacer | None = None,
) -> ProcessParts:
    """Returns the parts of a worker with replicas on `devices`; None for all local devices.

    `placer` places the variables it creates; None if the coordinator creates them.
    """
    found = local_devices() if devices is None else find_devices(list(devices))
    topology = Topology(found, first_replica_id=index * len(found))
    variables = VariableClient(client, placer, mode)
    steps = _steps(variables, len(found))
    steps.counts_from_zero = placer is None
    return ProcessParts(topology, RemotePlacement(steps))


def independent_parts(
    cluster: Cluster,
    worker: int,
    num_workers: int,
    partitioner: Partitioner | None,
    mode: UpdateMode,
    devices: Sequence[DeviceLike] | None = None,
    *,
    silence_s: float | None = None,
) -> ProcessParts:
    """Returns the parts of a worker that runs its own program.

    All workers create the same variables in the same order: the first one creates them on the
    servers, the others find them there.
    """
    connections = connect(cluster, silence_s)
    parts = worker_parts(
        ServerClient(connections, f"worker {worker}"),
        worker,
        mode,
        devices,
        placer=ShardPlacer(len(cluster.server_addresses), partitioner),
    )
    parts.placement.remote.lost_updates = LostUpdates(worker)
    parts.executor = functools.partial(IndependentWorker, worker=(worker, num_workers))
    parts.cluster, parts.connections = cluster, connections
    return parts


# Entry points of servers and workers; importing them imports all that models need.


def start_cluster(plan: ClusterPlan) -> Cluster:
    """Starts the servers of a planned cluster, or joins it as an independent worker."""
    kind = SharedCluster if plan.task else CoordinatedCluster
    return kind(plan, serve_server, serve_worker)


def serve_server(index: int, keys: ClusterKeys, journals: JournalPlan) -> ParameterServer:
    """Starts a parameter server in this process; creates the journal folder if missing."""
    _compute_inline()
    assert journals.folder is not None
    folder = Path(journals.folder)
    if journals.is_temporary:
        sweep_journals(folder.parent)
    return ParameterServer(
        keys,
        host=own_host(),
        journal=folder / f"server-{index}.journal",
        journal_interval_s=journals.interval_s,
        is_durable=journals.is_durable,
        removes_journal=journals.is_temporary,
    )


def serve_worker(index: int, keys: ClusterKeys) -> Worker:
    """Starts a worker in this process."""
    _compute_inline()
    return make_worker(keys, host=own_host())


def make_worker(
    keys: ClusterKeys,
    *,
    host: str = "127.0.0.1",
    devices: Sequence[DeviceLike] | None = None,
) -> Worker:
    """Returns a worker with a replica on each of `devices`; None for all local ones."""

    def make_strategy(client: ServerClient, index: int, mode: UpdateMode) -> RemoteStateStrategy:
        return RemoteStateStrategy(worker_parts(client, index, mode, devices))

    return Worker(keys, KERAS_PACKING, make_strategy, host=host)


def _compute_inline() -> None:
    """Makes CPU computations run in the calling thread, which waits for them anyway."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)


# Parameter-server strategy: workers read and update variables independently.


@final
class ParameterServerStrategy(RemoteStateStrategy):
    """Stores variables on parameter servers, where workers read and update them independently.

    The process that creates it is the coordinator: Keras's `fit` assigns batches to workers, and
    `sg.coordinator.ClusterCoordinator` schedules your own functions. Processes that die are
    restarted. Ray places them in a cluster; without one they run on this machine.

    One program may run as every task of a cluster with a chief: in tasks that do not train, the
    strategy starts nothing, and training under it is an error.

    Args:
        cluster_resolver: the cluster; None for `TF_CONFIG` or Slurm's, or else this machine.
        variable_partitioner: splits variables over servers; None for no splitting.
        synchronous: True sums the gradients of all workers before each update.
        backup_workers: number of workers that a synchronous update does not wait for; their late
            gradients are discarded.
        max_staleness: limit on the age, in updates, of the values that gradients are computed from;
            a step with older values is rerun. None for no limit.
        journal_dir: a folder on each server's machine for a journal of its variables; another
            strategy with the same folder resumes from there. None for a temporary one: a server
            that dies still restarts from its journal.
        num_workers: number of workers without a cluster.
        num_servers: number of servers without a cluster.
        independent: True if this program runs as the chief and each worker of `TF_CONFIG`, and each
            trains by itself on the same servers; the ps tasks run `stratagem server`. Call
            `close()` at the end: the leader waits for the others and stops the servers.
        options: limits, from `sg.coordinator.options`; None for its defaults.

    Raises:
        ValueError: a resolver with an empty cluster; a cluster without servers or workers, with two
            chiefs, or with an unknown job or task; `num_workers` or `num_servers` with a cluster;
            inconsistent numbers; without a chief, a task that is not the coordinator.
        TypeError: an argument of another type.
        ImportError: pyzmq or cloudpickle is not installed, or Ray for a cluster of machines.
        DeadlineExceededError: some tasks of the cluster did not join in time.

    Example:
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.layers.Dense(1)])
        ...         model.compile("sgd", "mse")
        ...     history = model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
        >>> len(history.history["loss"])
        1

    Source: TF 2.21 parameter_server_strategy_v2.py, ParameterServerStrategyV2.
    """

    @recreatable
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        synchronous: bool = False,
        backup_workers: int = 0,
        max_staleness: int | None = None,
        journal_dir: str | os.PathLike[str] | None = None,
        num_workers: int | None = None,
        num_servers: int | None = None,
        independent: bool = False,
        options: CoordinatorOptions | None = None,
    ) -> None:
        resolver, spec = checked_cluster(cluster_resolver, "ParameterServerStrategy")
        refuse_to_plan("A ParameterServerStrategy")
        self._resolver = resolver
        if spec:
            refuse_numbers(spec, num_workers=num_workers, num_servers=num_servers)
            if not independent:
                check_counts(spec)
        own_task = (resolver.task_type, resolver.task_id)
        if is_non_training(spec, own_task, independent=independent):
            executor = functools.partial(NonTraining, task=own_task)
            super().__init__(ProcessParts(Topology(local_devices()[:1]), Replicated(), executor))
            return
        if independent:
            plan = ClusterPlan.independent(spec, own_task)
        elif spec:
            plan = ClusterPlan.of(spec, resolver.task_type)
        else:
            plan = ClusterPlan.local(num_workers, num_servers)
        limits = checked_options(options, independent=independent)
        plan = plan.with_journals(journal_dir, limits)
        mode = update_mode(
            plan.num_workers,
            synchronous=synchronous,
            backup_workers=backup_workers,
            max_staleness=max_staleness,
        )
        cluster, partitioner = start_cluster(plan), variable_partitioner
        silence_s = limits.recovery_timeout_s
        if plan.task is None:
            parts = coordinator_parts(cluster, partitioner, mode, silence_s)
        else:
            worker, count = id_in_cluster(spec, *plan.task), plan.num_workers
            parts = independent_parts(
                cluster, worker, count, partitioner, mode, silence_s=silence_s
            )
        super().__init__(parts, limits)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None without one."""
        return self._resolver


# HybridStrategy: mirrored variables, and large ones stored by rules.


# Parameter servers for large tables of a lockstep strategy in one process.


class TableServers(Closing):
    """Parameter servers of a strategy whose other variables are local.

    The replicas are in lockstep and this process is the only client, so servers apply updates at
    once, as a single device would. `steps` runs steps and has the `variables`. Closing this stops
    the servers. The arguments are those of `HybridStrategy`, with their errors.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        variable_partitioner: Partitioner | None,
        cluster_resolver: ClusterResolver | None,
        num_servers: int | None,
        journal_dir: str | os.PathLike[str] | None,
        options: CoordinatorOptions | None,
    ) -> None:
        refuse_to_plan("A HybridStrategy with tables on parameter servers")
        limits = checked_options(options, independent=True)
        resolver, spec = checked_cluster(cluster_resolver, "HybridStrategy")
        plan = ClusterPlan.servers_only(spec, resolver.task_type, num_servers)
        self._cluster = cluster = start_cluster(plan.with_journals(journal_dir, limits))
        self._connections = connect(cluster, limits.recovery_timeout_s)
        cluster.report_moves_to(self._connections.move, self._connections.abandon)
        self.num_servers = len(cluster.server_addresses)
        variables = VariableClient(
            ServerClient(self._connections),
            ShardPlacer(self.num_servers, variable_partitioner),
            ASYNCHRONOUS,
            is_coordinator=True,
        )
        self.steps = RemoteSteps(variables, num_replicas, keras=ServerKeras(), is_alone=True)
        self.steps.lost_updates = LostUpdates()

    def close(self) -> None:
        """Stops the servers and discards their variables."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._cluster.close)
            stack.callback(self._connections.close)


def _refuse_without_servers(**arguments: object) -> None:
    """Raises a ValueError for arguments of servers if no variable is placed there."""
    given = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
    if given:
        raise invalid(
            f'A HybridStrategy received {", ".join(given)}, but no rule has the place "server".',
            expected="arguments for parameter servers only if a rule uses them.",
            fix='pass placement={"embedding": "server"}, or omit these arguments.',
        )


@final
class HybridStrategy(Strategy, Closing):
    """Trains one model on several devices in lockstep, and stores large variables by rules.

    A variable that no rule matches is mirrored: each device has a copy. A "central" variable is
    stored once, on the parameter device, which updates it; a "sharded" one is sharded over the
    replicas' devices; a "pinned_host" one is sharded over pinned host memory, as under
    `CentralStorageStrategy`; a "server" one is on parameter servers, which update it, as under
    `ParameterServerStrategy`. Optimizer slots are stored with their variable, and the optimizer's
    counter and learning rate in this process. Layers that look up rows of a large table
    (`keras.layers.Embedding`, `sg.nn.embedding_lookup`) move only these rows and their gradients.
    Results match a single device, except that slots of rows on servers decay only in steps that
    look the rows up.

    With a "server" rule, use it as a context manager or call `close()`, which ends the servers.

    Args:
        devices: as for `MirroredStrategy`.
        cross_device_ops: how gradients are combined; None lets the compiler choose.
        placement: "mirrored", "central", "sharded", "pinned_host" or "server" by rule. A rule is a
            regular expression, searched in the variable's path, or a predicate of the variable,
            such as `sg.placement.at_least_bytes(2**30)`. The first match wins.
        parameter_device: device of central variables; None for the host.
        variable_partitioner: splits variables over several servers; None for no splitting.
        cluster_resolver: the cluster, with this process as its chief; None for `TF_CONFIG`, or else
            servers on this machine.
        num_servers: number of servers without a cluster; None for two.
        journal_dir: as for `ParameterServerStrategy`.
        options: limits of the servers, from `sg.coordinator.options`; None for its defaults.

    Raises:
        ValueError: devices as for `MirroredStrategy`; an unknown place, or devices without pinned
            host memory; when training starts, a rule that is the first match of no variable;
            arguments for servers without a "server" rule, or a cluster without ps tasks or with
            workers.
        TypeError: an argument of another type.
        ImportError: with a "server" rule, Ray, pyzmq or cloudpickle is not installed.

    Example:
        >>> strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"embedding": "sharded"})
        >>> with strategy.scope():
        ...     table = keras.layers.Embedding(100_000, 16)

    Source: tensorflow/tensorflow issues 27726 and 20651, which ask for it.
    """

    @recreatable
    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        placement: Mapping[str | Callable[[Any], bool], str],
        parameter_device: DeviceLike | None = None,
        variable_partitioner: Partitioner | None = None,
        cluster_resolver: ClusterResolver | None = None,
        num_servers: int | None = None,
        journal_dir: str | os.PathLike[str] | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        topology = local_topology(devices, name="devices")
        requested = [*placement.values()] if isinstance(placement, Mapping) else []
        has_central = CENTRAL in requested or parameter_device is not None
        central = SingleDeviceStore(parameter_device_of(parameter_device)) if has_central else None
        places = {**places_on_replicas(placement, topology), CENTRAL: central, SERVER: None}
        check_rules(placement, places)  # before servers start
        self._resolver = cluster_resolver
        arguments: dict[str, Any] = {
            "variable_partitioner": variable_partitioner,
            "cluster_resolver": cluster_resolver,
            "num_servers": num_servers,
            "journal_dir": journal_dir,
            "options": options,
        }
        self._servers: TableServers | None = None
        if SERVER in requested:
            self._servers = TableServers(topology.num_replicas, **arguments)
        else:
            _refuse_without_servers(**arguments)
        steps = None if self._servers is None else self._servers.steps
        rules = PlacementRules(placement, places, steps)
        super().__init__(topology, cross_device_ops, placement=rules)

    def __repr__(self) -> str:
        servers = f", {self._servers.num_servers} servers" if self._servers is not None else ""
        return f"{type(self).__name__}({self.topology}{servers})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if self._servers is None:
            return super().__deepcopy__(memo)
        raise copy_refused(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the servers' cluster; None without one."""
        return self._resolver

    def close(self) -> None:
        """Ends the servers and discards their variables; does nothing without servers."""
        if self._servers is not None:
            self._servers.close()

"""Parts of a parameter-server strategy in the coordinator, workers and other tasks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stratagem.cluster.roles import id_in_cluster
from stratagem.cluster.spec import ClusterSpec
from stratagem.devices.finding import DeviceLike, find_devices, local_devices
from stratagem.devices.mesh import Topology
from stratagem.errors import UnavailableError, report_error
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.transport.connection import Connections
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.lost_updates import LostUpdates
from stratagem.parameter_server.client.remote_steps import RemoteSteps
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.client.variable_client import VariableClient
from stratagem.parameter_server.cluster.cluster_plan import Cluster, ClusterPlan
from stratagem.parameter_server.cluster.remote_state_strategy import ProcessParts
from stratagem.parameter_server.coordinator.shipping import Scheduling
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.keras.server_keras import ServerKeras
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.strategies.strategy import NonTraining
from stratagem.variables.placement import Replicated

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy


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


def training_parts(
    cluster: Cluster,
    plan: ClusterPlan,
    spec: ClusterSpec,
    partitioner: Partitioner | None,
    mode: UpdateMode,
    silence_s: float | None,
) -> ProcessParts:
    """Returns the parts of this process, a coordinator or an independent worker of the plan."""
    if plan.task is None:
        return coordinator_parts(cluster, partitioner, mode, silence_s)
    worker = id_in_cluster(spec, *plan.task)
    return independent_parts(
        cluster,
        worker,
        plan.num_workers,
        partitioner,
        mode,
        silence_s=silence_s,
    )


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
    cluster.report_moves_to(connections.move)
    cluster.report_moves_to(functools.partial(_send_rules_again, client))
    variables = VariableClient(
        client,
        ShardPlacer(len(cluster.server_addresses), partitioner),
        mode,
        has_journals=cluster.has_journals,
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
    del address

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
    has_journals: bool = False,
) -> ProcessParts:
    """Returns the parts of a worker with replicas on `devices`; None for all local devices.

    `placer` places the variables it creates; None if the coordinator creates them.
    """
    found = local_devices() if devices is None else find_devices(list(devices))
    topology = Topology(found, first_replica_id=index * len(found))
    variables = VariableClient(client, placer, mode, has_journals=has_journals)
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
        has_journals=cluster.has_journals,
    )
    parts.placement.remote.lost_updates = LostUpdates(worker)
    parts.executor = functools.partial(IndependentWorker, worker=(worker, num_workers))
    parts.cluster, parts.connections = cluster, connections
    return parts


def non_training_parts(task: tuple[str | None, int | None]) -> ProcessParts:
    """Returns the parts of a task that does not train."""
    executor = functools.partial(NonTraining, task=task)
    return ProcessParts(Topology(local_devices()[:1]), Replicated(), executor)

"""Mirrored variables in processes that continue without those that are lost."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, final

import jax

from stratagem.cluster.detection import detect
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.devices.collectives.elastic_rounds import serve_rounds
from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.mesh import Topology
from stratagem.devices.separate_processes import start_separately
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.elastic.views import View
from stratagem.group.random_state import agree_on_random_state
from stratagem.strategies.backed_ops import BackedOps
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.strategies.base.recreate import recreatable
from stratagem.strategies.elastic_admission import ElasticAdmission
from stratagem.strategies.elastic_members import (
    check_constant_batch,
    check_num_backup_workers,
    join_elastic_group,
    move_variables,
)
from stratagem.strategies.elastic_membership import ElasticMembership
from stratagem.strategies.local_topology import local_topology
from stratagem.strategies.membership import check_resolver, copy_refused


@final
class ElasticStrategy(ElasticMembership):
    """Trains one model in several processes in lockstep, which continue if some of them are lost.

    Each process has one CPU device and a copy of the model. If a process dies, no variable has
    changed by the step that it broke. The others split the same batch among themselves, and run the
    step again: in the same processes, from the weights that they have. So the global batch stays as
    it is, and the weights are those of an uninterrupted run with these members in each step.

    A process that is started again joins the others, before a batch of `fit` or at a call of
    `admit`, and continues from their values.

    All processes read the same data, and each uses its rows. Metrics count what a lost process has
    counted.

    Args:
        cluster_resolver: the cluster and this process's task; None reads the environment. It lists
            the address of every process.
        num_backup_workers: number of workers that a training step need not wait for, k. The first
            n - k of n workers make the step; those that are late apply it, too, without their rows.
            0 waits for all. With more, lost workers cannot join again. A single process has no
            backup workers.
        constant_batch: rows of a step of `fit` if members are lost. With "global", those left take
            more rows each, and the steps are those of all members. With "worker", each takes at
            most as many rows as with all members, so its memory is enough; a batch then takes
            several steps, each with an update of the weights.
        allow_unauthenticated: as for `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: an invalid cluster, a task that does not train, several hosts without a secret,
            another `constant_batch`; `num_backup_workers` is negative, or not less than the number
            of processes, or there are spares as well.
        TypeError: an argument of another type.
        DeadlineExceededError: not all processes came in time; the message names the missing ones.
        RuntimeError: JAX has started already, or a process has several devices.

    Example:
        >>> strategy = sg.ElasticStrategy()  # no cluster: one device
        >>> strategy.num_replicas_in_sync
        1

    Source: Birman and Joseph, Exploiting virtual synchrony in distributed systems, 1987; PyTorch,
    torchft; Chen et al., Revisiting distributed synchronous SGD, 2016; TF 1.15
    sync_replicas_optimizer.py, SyncReplicasOptimizer.
    """

    @recreatable
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        num_backup_workers: int = 0,
        constant_batch: Literal["global", "worker"] = "global",
        allow_unauthenticated: bool = False,
    ) -> None:
        check_resolver(cluster_resolver, "cluster_resolver")
        check_num_backup_workers(num_backup_workers)
        check_constant_batch(constant_batch)
        self._resolver = cluster_resolver or detect() or TFConfigClusterResolver()
        processes = self._resolver.processes()
        self._devices: tuple[jax.Device, ...] = ()
        if processes.num_processes == 1:
            topology = local_topology(["cpu:0"], name="devices")
            super().__init__(topology, executor=Lockstep)
            return
        group = self._group = join_elastic_group(
            self._resolver,
            num_backup_workers=num_backup_workers,
            allow_unauthenticated=allow_unauthenticated,
        )
        self._devices = start_separately(processes.num_processes, processes.process_id)
        serve_rounds(group)
        super().__init__(
            self._topology_of(group.view),
            BackedOps() if num_backup_workers else AutomaticOps(CommunicationOptions()),
            executor=ElasticLockstep,
        )
        executor: Any = self.executor
        executor.keeps_worker_rows = constant_batch == "worker"
        group.on_change(self._continue)
        admission = self._admission = ElasticAdmission(self, group)
        self.fit_callbacks = lambda: [ElasticAdmission.callback(admission)]
        agree_on_random_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise copy_refused(self)

    def _topology_of(self, view: View) -> Topology:
        return Topology(tuple(self._devices[member] for member in view.members))

    def _continue(self, view: View) -> None:
        """Continues with the members of a view, and the values that this process has."""
        before, self.topology = self.topology, self._topology_of(view)
        if self._admission is not None and self._admission.has_values(before):
            move_variables(self.variables, before, self.topology)

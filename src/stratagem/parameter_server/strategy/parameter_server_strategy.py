"""Parameter-server strategy: workers read and update variables independently."""

from __future__ import annotations

import os
from typing import final

from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.finding import refuse_to_plan
from stratagem.parameter_server.cluster.cluster_plan import (
    ClusterPlan,
    CoordinatorOptions,
    check_counts,
    checked_cluster,
    checked_options,
    is_non_training,
    refuse_numbers,
    update_mode,
)
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.strategy.entry_points import start_cluster
from stratagem.parameter_server.strategy.process_parts import non_training_parts, training_parts
from stratagem.strategies.strategy import recreatable


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
            super().__init__(non_training_parts(own_task))
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
        silence_s = limits.recovery_timeout_s
        cluster, partitioner = start_cluster(plan), variable_partitioner
        parts = training_parts(cluster, plan, spec, partitioner, mode, silence_s)
        super().__init__(parts, limits)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None without one."""
        return self._resolver

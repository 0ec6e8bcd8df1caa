"""Mirrored variables in processes that continue without those that are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import logs, settings
from stratagem.cluster.detection import detect
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.devices.collectives.elastic_rounds import serve_rounds
from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.finding import start_separately
from stratagem.devices.mesh import Topology
from stratagem.errors import NOT_NEEDED, explain
from stratagem.execution.communicator import MeshCommunicator
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.authentication.secret import Credentials
from stratagem.group.current import agree_on_random_state, set_current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.views import NotAdmittedError, View
from stratagem.group.verdict import GroupLimits
from stratagem.options import ReduceOp, VariableAggregation
from stratagem.strategies.base.cross_device_ops import AutomaticOps
from stratagem.strategies.base.recreate import recreatable
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.elastic_admission import ElasticAdmission
from stratagem.strategies.local_topology import local_topology
from stratagem.strategies.membership import check_resolver, copy_refused, identity_of
from stratagem.variables.components import components_of_members, store_components
from stratagem.variables.registry import Home, VariableKind, VariableRegistry, home_of

# Sums and means over replicas of which some may be left out of a step.


class BackedOps(AutomaticOps):
    """The cross-device ops of a strategy with backup workers.

    A sum stands for the rows of all replicas: it is multiplied by their number, divided by that of
    the rows that took part. A mean is that of the replicas that took part, which may have unequal
    numbers of rows.
    """

    def __init__(self) -> None:
        super().__init__(CommunicationOptions())

    def communicator(self, topology: Topology) -> MeshCommunicator:
        """Returns the communicator of a step on some devices."""
        sums = super().communicator(topology)
        return BackedCommunicator(sums.axis, sums.algorithm, sums.packing)


class BackedCommunicator(MeshCommunicator):
    """Divides a mean by the number of replicas that take part, of which a sum has the same scale.

    Outside a compiled step, all replicas are there.
    """

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        """Combines one array."""
        return self.all_reduce_many(op, [value])[0]

    def all_reduce_many(self, op: ReduceOp, values: Sequence[Any]) -> list[Any]:
        """Combines many arrays."""
        if op is ReduceOp.SUM:
            return super().all_reduce_many(op, values)
        totals = super().all_reduce_many(ReduceOp.SUM, list(map(_as_float, values)))
        # A sum of a constant would be computed while the step is traced.
        one = jax.lax.optimization_barrier(jnp.ones((), jnp.float32))
        count = super().all_reduce(ReduceOp.SUM, one)
        return [_quotient(total, count) for total in totals]


def _as_float(value: object) -> jax.Array:
    array = jnp.asarray(value)  # only sums of floats have the scale of the step
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    # A scaled count is no short fraction.
    wide = total.dtype if total.dtype.itemsize >= 4 else jnp.float32
    return (total.astype(wide) / count.astype(wide)).astype(total.dtype)


# Members of an elastic strategy as its user sees them, and how others join.


class ElasticMembership(Strategy):
    """A strategy with an elastic group; without one, this process is its only member."""

    _resolver: ClusterResolver
    _group: ElasticGroup | None = None
    _admission: ElasticAdmission | None = None

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        return self._resolver

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the processes that train, in replica order.

        Example:
            >>> sg.ElasticStrategy().members
            (0,)

        Source: specific to Stratagem.
        """
        return (0,) if self._group is None else self._group.view.members

    @property
    def participants(self) -> tuple[int, ...]:
        """Ids of the processes whose values the last step has combined, in replica order.

        A process that is lost at the end of a step may have taken part in it. With backup workers,
        this process may be no participant itself.

        Example:
            >>> sg.ElasticStrategy().participants
            (0,)

        Source: specific to Stratagem.
        """
        return (0,) if self._group is None else self._group.participants

    def admit(
        self,
        fn: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Admits processes that were started again, in a custom loop; `fit` does it by itself.

        Call it on every process before each step, outside of `run`. In a process that joins, the
        first call waits until the others admit it. Then all variables have the values of the
        others, so a loop that counts its steps in a variable continues with their step.

        Args:
            fn: the function of the next `run`; a process that joins compiles it before the others
                wait for it. None compiles nothing.
            args: arguments of that `run`, which may have other values.
            kwargs: its keyword arguments.

        Raises:
            UnavailableError: all others ended before this process could join.
            ValueError: this process has other variables than the others.

        Example:
            >>> strategy = sg.ElasticStrategy()
            >>> with strategy.scope():
            ...     num_steps = sg.Variable(0)
            >>> while True:
            ...     strategy.admit()
            ...     if int(num_steps) == 3:  # read after `admit`
            ...         break
            ...     _ = strategy.run(lambda: num_steps.assign_add(1))
            >>> int(num_steps)
            3

        Source: specific to Stratagem.
        """
        admission, executor = self._admission, self.executor
        if admission is None:
            return
        if not admission.is_waiting:
            admission.admit()
            return

        def prepare() -> None:
            if fn is not None and isinstance(executor, ElasticLockstep):
                with self.scope():
                    executor.compile_call(fn, args, kwargs or {})

        admission.join_loop(prepare)


# Joining of an elastic group, and the variables of its present members.

_logger = logging.getLogger(__name__)


def check_num_backup_workers(number: object, num_processes: int | None = None) -> None:
    """Raises TypeError unless it is an int, ValueError if it is out of range.

    `num_processes` is the number of processes, if it is known.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(
            explain(
                f"num_backup_workers={number!r} is of type {type(number).__name__}.",
                expected="an int.",
                fix="pass the number of workers that a step need not wait for, such as 1.",
            )
        )
    if number < 0 or (num_processes is not None and number >= num_processes):
        several = "" if num_processes is None else f" of {num_processes} workers"
        raise ValueError(
            explain(
                f"num_backup_workers={number}{several} is out of range.",
                expected="0 or more, and less than the number of workers.",
                fix="pass a smaller number: the others make each step.",
            )
        )


def join_elastic_group(
    resolver: ClusterResolver, *, num_backup_workers: int = 0, allow_unauthenticated: bool
) -> ElasticGroup:
    """Joins the group of a cluster.

    Raises ValueError if it has no addresses, uses TLS, or has too few workers. Ends this process if
    the group trains already, with backup workers: the launcher does not start it again then.
    """
    identity = identity_of(resolver, resolver.processes(), with_addresses=True)
    check_num_backup_workers(num_backup_workers, identity.num_processes)
    num_spares = settings.read("num_spares")
    _check_spares(num_spares, identity.num_processes, num_backup_workers)
    credentials = Credentials.find(
        identity.label, identity.hosts, allow_unauthenticated=allow_unauthenticated
    )
    if credentials.certificates is not None:
        raise ValueError(
            explain(
                "STRATAGEM_TLS_DIR is set.",
                expected="no TLS: members of an ElasticStrategy exchange gradients in plain text.",
                fix="unset it on a network that only the processes can reach, or use "
                "MultiWorkerMirroredStrategy.",
            )
        )
    limits = GroupLimits(
        join_s=settings.read("join_timeout_s"),
        peer_s=settings.read("peer_timeout_s"),
        stuck_s=settings.read("stuck_timeout_s"),
        barrier_s=settings.read("barrier_timeout_s"),
    )
    try:
        group = ElasticGroup(
            identity,
            limits,
            credentials,
            num_backups=num_backup_workers,
            num_spares=num_spares,
            prepares=True,
        )
    except NotAdmittedError as error:
        logs.announce(_logger, str(error))
        raise SystemExit(NOT_NEEDED) from None
    joined: Any = group
    set_current_group(joined)
    return group


def _check_spares(num_spares: int, num_processes: int, num_backup_workers: int) -> None:
    if num_spares >= num_processes:
        raise ValueError(
            explain(
                f"STRATAGEM_NUM_SPARES is {num_spares}, but the cluster has "
                f"{num_processes} processes.",
                expected="at least one process that is no spare.",
                fix="add workers, or lower STRATAGEM_NUM_SPARES.",
            )
        )
    if num_spares and num_backup_workers:
        raise ValueError(
            explain(
                f"num_backup_workers is {num_backup_workers}, and STRATAGEM_NUM_SPARES is "
                f"{num_spares}.",
                expected="one of both: with backup workers no process joins later, since the "
                "members that are late would not know of it.",
                fix="start without --spares, or leave out num_backup_workers.",
            )
        )


def check_constant_batch(constant_batch: object) -> None:
    """Raises ValueError for another value than "global" and "worker"."""
    if constant_batch not in ("global", "worker"):
        raise ValueError(
            explain(
                f"constant_batch={constant_batch!r} was passed.",
                expected='"global" or "worker".',
                fix='use "worker" if the memory of a worker has no room for more rows.',
            )
        )


def move_variables(variables: VariableRegistry, before: Topology, after: Topology) -> None:
    """Moves variables to the present members, this process among them before and after."""
    places = [_process_of(device) for device in before.devices or ()]
    members = [_process_of(device) for device in after.devices or ()]
    kept = [places.index(one) if one in places else None for one in members]
    own = members.index(jax.process_index())
    moved: list[Any] = variables.live()
    for variable in moved:
        home = home_of(variable)
        if not variable.has_value:
            continue
        if home is not None and home.kind is VariableKind.ON_READ:
            store_components(variable, _components(variable, home, kept, own), after)
        else:
            variable.stored = after.replicate(variable.stored.addressable_data(0))


def _process_of(device: jax.Device) -> int:
    return device.process_index


def _components(
    variable: Any, home: Home, kept: Sequence[int | None], own: int
) -> np.ndarray[Any, Any]:
    if variable.whole.storage is variable.stored:
        gathered = np.asarray(variable.whole.gathered)
        return components_of_members(gathered, home.aggregation, kept)
    # An initial value, of which each process knows its own component.
    value = variable.stored.addressable_data(0)[0]
    if home.aggregation is not VariableAggregation.SUM:
        return np.broadcast_to(value, (len(kept), *variable.shape))
    rows = np.zeros((len(kept), *variable.shape), variable.dtype)
    rows[own] = value
    return rows


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

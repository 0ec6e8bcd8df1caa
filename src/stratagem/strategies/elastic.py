"""Mirrored variables in processes that continue without those that are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import jax
import numpy as np

from stratagem import logs, settings
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.elastic_rounds import serve_rounds
from stratagem.devices.finding import start_separately
from stratagem.devices.mesh import Topology
from stratagem.errors import NOT_NEEDED, UnavailableError, invalid
from stratagem.execution.programs.elastic import ElasticLockstep, expected
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.authentication.secret import Credentials
from stratagem.group.current import agree_on_random_state, set_current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.joining import RunningGroup, TrainingState, hand_over, receive
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.group.elastic.views import View
from stratagem.group.verdict import GroupLimits
from stratagem.options import VariableAggregation
from stratagem.strategies.cross_device_ops import AutomaticOps
from stratagem.strategies.membership import identity_of, local_topology, resolver_of
from stratagem.strategies.strategy import Strategy, recreatable
from stratagem.variables.components import components_of_members, store_components
from stratagem.variables.registry import Home, VariableRegistry, home_of, is_on_read

_logger = logging.getLogger(__name__)
_LOOP = "loop"


@final
class ElasticStrategy(Strategy):
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
        allow_unauthenticated: as for `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: an invalid cluster, a task that does not train, or several hosts without a
            secret.
        DeadlineExceededError: not all processes came in time; the message names the missing ones.
        RuntimeError: JAX has started already, or a process has several devices.

    Example:
        >>> strategy = sg.ElasticStrategy()  # no cluster: one device
        >>> strategy.num_replicas_in_sync
        1

    Source: Birman and Joseph, Exploiting virtual synchrony in distributed systems, 1987; PyTorch,
    torchft.
    """

    _group: ElasticGroup | None = None  # None for a process without others
    _admission: ElasticAdmission | None = None
    _is_copyable = False

    @recreatable
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        allow_unauthenticated: bool = False,
    ) -> None:
        self._resolver = resolver_of(cluster_resolver)
        processes = self._resolver.processes()
        self._devices: tuple[jax.Device, ...] = ()
        if processes.num_processes == 1:
            topology = local_topology(["cpu:0"], name="devices")
            super().__init__(topology, executor=Lockstep)
            return
        group = self._group = _join_group(
            self._resolver, allow_unauthenticated=allow_unauthenticated
        )
        self._devices = start_separately(processes.num_processes, processes.process_id)
        serve_rounds(group)
        super().__init__(
            self._topology_of(group.view),
            AutomaticOps(CommunicationOptions()),
            executor=ElasticLockstep,
        )
        group.on_change(self._continue)
        admission = self._admission = ElasticAdmission(self, group)
        self.fit_callbacks = lambda: [ElasticAdmission.callback(admission)]
        agree_on_random_state()

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

        A process that is lost at the end of a step may have taken part in it.

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

    @property
    def topology(self) -> Topology:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The devices of the members; while a step is compiled for others, theirs."""
        return expected.get() or self._topology

    @topology.setter
    def topology(self, value: Topology) -> None:
        self._topology = value

    def _topology_of(self, view: View) -> Topology:
        return Topology(tuple(self._devices[member] for member in view.members))

    def _continue(self, view: View) -> None:
        """Continues with the members of a view, and the values that this process has."""
        before, self._topology = self._topology, self._topology_of(view)
        if self._admission is not None and self._admission.has_values(before):
            _move_variables(self.variables, before, self._topology)


def _join_group(resolver: ClusterResolver, *, allow_unauthenticated: bool) -> ElasticGroup:
    """Joins the group of a cluster; raises ValueError if it has no addresses, or uses TLS."""
    identity = identity_of(resolver, resolver.processes(), with_addresses=True)
    credentials = Credentials.find(
        identity.label, identity.hosts, allow_unauthenticated=allow_unauthenticated
    )
    if credentials.certificates is not None:
        raise invalid(
            "STRATAGEM_TLS_DIR is set.",
            expected="no TLS: members of an ElasticStrategy exchange gradients in plain text.",
            fix="unset it on a network that only the processes can reach, or use "
            "MultiWorkerMirroredStrategy.",
        )
    limits = GroupLimits(
        join_s=settings.read("join_timeout_s"),
        peer_s=settings.read("peer_timeout_s"),
        stuck_s=settings.read("stuck_timeout_s"),
        barrier_s=settings.read("barrier_timeout_s"),
    )
    group = ElasticGroup(identity, limits, credentials, prepares=True)
    joined: Any = group
    set_current_group(joined)
    return group


def _move_variables(variables: VariableRegistry, before: Topology, after: Topology) -> None:
    """Moves variables to the present members, this process among them before and after."""
    places = [device.process_index for device in before.devices or ()]
    members = [device.process_index for device in after.devices or ()]
    kept = [places.index(one) if one in places else None for one in members]
    own = members.index(jax.process_index())
    moved: list[Any] = variables.live()
    for variable in moved:
        home = home_of(variable)
        if not variable.has_value:
            continue
        if home is not None and is_on_read(variable):
            store_components(variable, _components(variable, home, kept, own), after)
        else:
            variable.stored = after.replicate(variable.stored.addressable_data(0))


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


# Joining of an elastic group: the state that a process receives, and where it continues.


class ElasticAdmission:
    """Admits processes to an elastic group, and joins one."""

    # Set by the Keras integration, a package above this one.
    callback: ClassVar[Any]
    random_state: ClassVar[Any]

    def __init__(self, strategy: Strategy, group: ElasticGroup) -> None:
        self._strategy, self._group = strategy, group
        self._call = 0
        self._fit_state: Callable[[], dict[str, Any]] | None = None
        self._received: TrainingState | None = None
        self._is_restored = True
        group.admissions.on_newcomers(self._deliver)

    @property
    def is_waiting(self) -> bool:
        """True in a process that has not joined yet."""
        return self._group.is_candidate

    def begin_call(self) -> str:
        """Begins a call of `fit`; returns its place."""
        self._call = self._group.admissions.begin_call()
        return f"fit:{self._call}"

    def admit(
        self,
        place: str = _LOOP,
        state: Callable[[], dict[str, Any]] | None = None,
        *,
        may_retry: bool = False,
    ) -> None:
        """Admits processes that wait at a place; `state` returns where they continue."""
        self._fit_state = state
        self._group.admit(place, may_retry=may_retry)

    def join(self, place: str, prepare: Callable[[], None]) -> dict[str, Any] | None:
        """Waits to join at a place; returns where to continue, or None if the call is over.

        `prepare` is called before, and whenever the expected number of members changes.
        """
        prepare()

        def look(running: RunningGroup) -> bool:
            if running.num_calls > self._call and place != _LOOP:
                return True
            if self._group.expect(running):
                prepare()
            return False

        if not self._wait(place, look):
            logs.announce(_logger, f"Call {self._call} of fit is over, and is skipped.")
            return None
        self._take_over()
        assert self._received is not None
        return self._received.document["fit"]

    def _wait(self, place: str, look: Callable[[RunningGroup], bool]) -> bool:
        """Waits to join; ends this process if it is not needed, since all others have ended."""
        try:
            return self._group.join(place, look)
        except UnavailableError as error:
            if not self._group.is_candidate:
                raise
            logs.announce(_logger, str(error))
            raise SystemExit(NOT_NEEDED) from None

    def _take_over(self) -> None:
        """Sets all variables, and keeps their values until the call of `fit` begins."""
        assert self._received is not None
        if not self._is_restored:
            self.restore()
        # A process that could not compile its step before would agree on initial values now.
        self._strategy.variables.take_unsettled()
        live: list[Any] = self._strategy.variables.live()
        arrays = [_value(variable) for variable in live]
        outside = self._received.arrays[len(live) :]
        self._received = TrainingState(self._received.document, [*arrays, *outside])
        executor = self._strategy.executor
        if isinstance(executor, ElasticLockstep):
            executor.outside_variables.end()

    def has_values(self, topology: Topology) -> bool:
        """Returns True once variables have the values of the others, which are set if necessary.

        `topology` is that of the members that were there when they were sent.
        """
        if self._group.is_candidate or self._group.admissions.is_new:
            return False
        if not self._is_restored:
            self.restore(topology)
        return True

    def join_loop(self, prepare: Callable[[], None]) -> None:
        """Waits to join at a call of `admit`, and takes the values of the others."""
        self.join(_LOOP, prepare)
        assert self._received is not None
        self.random_state().set_state(self._received.document["random"])
        self._received = None

    def restore(self, topology: Topology | None = None) -> None:
        """Sets all variables to the values received, for the present members or those before."""
        assert self._received is not None
        self._is_restored = True
        topology = topology or self._strategy.topology
        variables: list[Any] = self._strategy.variables.live()
        arrays = self._received.arrays
        for variable, array in zip(variables, arrays[: len(variables)], strict=True):
            if is_on_read(variable):
                store_components(variable, array, topology)
            else:
                variable.stored = topology.replicate(array)
        places = _places(self._outside_variables(), self._received.document["outside"])
        for variable, place in places:
            variable.assign(arrays[len(variables) + place])

    def end_place(self) -> None:
        """Ends the place of a call of `fit`."""
        self._fit_state = self._received = None
        self._group.admissions.end_place()

    def _deliver(self, connections: PeerConnections, source: int, newcomers: Sequence[int]) -> None:
        """Sends the state, or receives it; all members call this in one round."""
        own = self._group.member
        if own not in newcomers:
            hand_over(connections, source, newcomers, self._state if own == source else None)
            return
        try:
            self._received = receive(connections, source, newcomers, self._check)
            self._is_restored = False
        except PeerLostError:
            raise
        except Exception:
            self._group.close()  # the others need not wait for the end of this process
            raise

    def _state(self) -> TrainingState:
        variables: list[Any] = self._strategy.variables.live()
        outside = self._outside_variables()
        document = {
            "variables": [_description(variable) for variable in variables],
            "outside": [_description(variable) for variable in outside],
            "random": self.random_state().get_state(),
            "fit": None if self._fit_state is None else self._fit_state(),
        }
        values = [_value(variable) for variable in variables]
        return TrainingState(document, [*values, *(np.asarray(one.value) for one in outside)])

    def _outside_variables(self) -> list[Any]:
        executor = self._strategy.executor
        return [*executor.outside_variables] if isinstance(executor, ElasticLockstep) else []

    def _check(self, document: dict[str, Any]) -> None:
        """Raises ValueError if this process has other variables than the others."""
        own = [_description(variable) for variable in self._strategy.variables.live()]
        others: list[Any] = document["variables"]
        for place in range(max(len(own), len(others))):
            mine = own[place] if place < len(own) else None
            theirs = others[place] if place < len(others) else None
            if mine != theirs:
                raise invalid(
                    f"Variable {place} is {_named(mine)} in this process, but "
                    f"{_named(theirs)} in the others.",
                    expected="the variables of the others, made in the same order.",
                    fix="run the same program as the others. Make all variables before "
                    "strategy.admit() is called for the first time.",
                )
        _places(self._outside_variables(), document["outside"])


def _description(variable: Any) -> list[Any]:
    return [variable.path, list(variable.shape), str(variable.dtype), is_on_read(variable)]


def _value(variable: Any) -> np.ndarray[Any, Any]:
    if is_on_read(variable):  # components of all members, held since their last change
        return np.asarray(variable.whole.gathered)
    return np.asarray(variable.stored.addressable_data(0))


def _places(variables: Sequence[Any], descriptions: Sequence[list[Any]]) -> list[tuple[Any, int]]:
    """Returns the place of each variable of no strategy among those that the others have.

    Raises ValueError if the others have none of its name, shape and dtype.
    """
    left = dict(enumerate(descriptions))
    places: list[tuple[Any, int]] = []
    for variable in variables:
        own = _description(variable)
        place = next((place for place, one in left.items() if one == own), None)
        if place is None:
            raise invalid(
                f"A step of this process uses variable {_named(own)}, which was made outside "
                "of the strategy's scope. No step of the others uses it.",
                expected="the variables of the others.",
                fix="make it in strategy.scope(); an optimizer has variables as well.",
            )
        del left[place]
        places.append((variable, place))
    return places


def _named(description: list[Any] | None) -> str:
    if description is None:
        return "missing"
    path, shape, dtype, _ = description
    return f"{path!r} of shape {tuple(shape)} and dtype {dtype}"

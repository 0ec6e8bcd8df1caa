"""State of an elastic training that processes receive when they join."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from stratagem import logs
from stratagem.devices.mesh import Topology
from stratagem.errors import NOT_NEEDED, UnavailableError, explain
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.inbox import RunningGroup
from stratagem.group.elastic.peer_connections import (
    PeerConnections,
    PeerLostError,
    TrainingState,
    hand_over,
    receive,
)
from stratagem.strategies.base.strategy import Strategy
from stratagem.variables.components import store_components
from stratagem.variables.registry import VariableKind, home_of

_logger = logging.getLogger(__name__)
_LOOP = "loop"


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
            if _is_on_read(variable):
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
        own = jax.process_index()
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
                raise ValueError(
                    explain(
                        f"Variable {place} is {_named(mine)} in this process, but "
                        f"{_named(theirs)} in the others.",
                        expected="the variables of the others, made in the same order.",
                        fix="run the same program as the others. Make all variables before "
                        "strategy.admit() is called for the first time.",
                    )
                )
        _places(self._outside_variables(), document["outside"])


def _is_on_read(variable: Any) -> bool:
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


def _description(variable: Any) -> list[Any]:
    return [variable.path, list(variable.shape), str(variable.dtype), _is_on_read(variable)]


def _value(variable: Any) -> np.ndarray[Any, Any]:
    if _is_on_read(variable):  # components of all members, held since their last change
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
            raise ValueError(
                explain(
                    f"A step of this process uses variable {_named(own)}, which was made outside "
                    "of the strategy's scope. No step of the others uses it.",
                    expected="the variables of the others.",
                    fix="make it in strategy.scope(); an optimizer has variables as well.",
                )
            )
        del left[place]
        places.append((variable, place))
    return places


def _named(description: list[Any] | None) -> str:
    if description is None:
        return "missing"
    path, shape, dtype, _ = description
    return f"{path!r} of shape {tuple(shape)} and dtype {dtype}"

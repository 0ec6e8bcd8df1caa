"""Sends of fragments beside the steps that follow, as programs of their own.

The program of a step then has local weights only. Sending a fragment sets the global weights at
once, to arrays that are ready when the link is done; only what reads them waits. `overlap` steps
later a small program mixes them into the local weights.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import contexts as stack
from stratagem.devices.background import can_run_beside
from stratagem.devices.collectives.shared_sums import is_connected
from stratagem.devices.local_updates import LocalUpdates, fragments_of
from stratagem.devices.lockstep import wait_for_background
from stratagem.execution.context.replica import ReplicaContext, get_replica_context
from stratagem.execution.programs.followed_program import FollowUpProgram
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.numerics.global_weights import assign_global, mixed, next_globals, read_global
from stratagem.keras.numerics.sync_rounds import is_end_of_fixed_round


def leave_sends(
    optimizer: keras.optimizers.Optimizer,
    trained: list[Any],
    method: LocalUpdates,
    context: ReplicaContext,
) -> bool:
    """Leaves the synchronization to programs of its own; returns False if the step must do it.

    A step must if nothing follows it: in a loop on the devices, in an `sg.function`, in eager mode;
    and if it uses the weights again after its update. The sums of one machine, in memory or between
    devices, have no slow link to hide.
    """
    scope = current_scope()
    strategy: Any = context.strategy
    if not (method.overlap_steps and trained and scope is not None and runs_beside(strategy)):
        return False
    sends = trained[0].fragment_sends  # with the variables: a table here would keep them alive
    if sends is None or not sends.are_of(optimizer, trained):
        sends = trained[0].fragment_sends = FragmentSends(optimizer, trained, method, strategy)
    return scope.leave(sends, sends.changed)


def runs_beside(strategy: Any) -> bool:
    """Returns True if the sends of a strategy can run beside its steps."""
    return can_run_beside(strategy.topology) and not is_connected(strategy.topology)


class FragmentSends:
    """The programs that send and mix in the fragments of a model, and the steps when they run."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        trained: list[Any],
        method: LocalUpdates,
        strategy: Any,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._trained = trained
        self._method = method
        self._fragments = [
            _Fragment(members, offset, method, strategy)
            for members, offset in fragments_of(trained, method)
        ]
        self._count = _StepCount(cast("Any", optimizer.iterations))
        copies = [one.local_copy for one in trained]
        states = [one for each in trained for one in each.outer_state.values()]
        self.changed = [*trained, *copies, *states]

    def are_of(self, optimizer: object, trained: Sequence[Any]) -> bool:
        """Returns True for the sends of an optimizer that trains these variables."""
        is_alike = len(trained) == len(self._trained) and self._optimizer() is optimizer
        return is_alike and all(map(operator.is_, trained, self._trained))

    def before_step(self) -> None:
        """Notes the number of the step that begins."""
        self._count.before_step()

    def after_step(self) -> None:
        """Starts the sends that are due after a step, and mixes in what was sent before."""
        step = self._count.after_step()
        late_steps = self._method.overlap_steps
        for fragment in self._fragments:
            if is_end_of_fixed_round(self._method, fragment.offset, step):
                fragment.send(step)
        for fragment in self._fragments:
            if is_end_of_fixed_round(self._method, fragment.offset, step, late_steps):
                fragment.mix_in()


class _StepCount:
    """The number of steps, which the host reads only where others have set it."""

    def __init__(self, iterations: Any) -> None:
        self._iterations = iterations
        self._last: Any = None  # the array of the step before
        self._steps = 0

    @property
    def _stored(self) -> Any:
        return getattr(self._iterations, "stored", None)

    def before_step(self) -> None:
        """Reads the number, which waits for the step before, if another has set it."""
        if self._last is None or self._last is not self._stored:
            self._steps = int(np.asarray(self._iterations.value))

    def after_step(self) -> int:
        """Returns the number of the step that has begun."""
        self._last = self._stored
        self._steps += 1
        return self._steps


class _Fragment:
    """The programs of a fragment, which are made when it is sent for the first time."""

    def __init__(
        self, trained: Sequence[Any], offset: int, method: LocalUpdates, strategy: Any
    ) -> None:
        self.offset = offset
        self._strategy = strategy
        self._copies = [one.local_copy for one in trained]
        self._functions = _Functions(list(trained), method)
        self._sending: FollowUpProgram | None = None
        self._mixing: FollowUpProgram | None = None
        self._token: object = None

    def send(self, step: int) -> None:
        """Starts to send the local weights; the next steps may change them meanwhile."""
        own = _copied([one.storage for one in self._copies])
        number = self._strategy.topology.replicate(np.int32(step))
        if self._sending is None:
            self._sending = FollowUpProgram(
                self._strategy, self._functions.send_fragment, own, number
            )
        self._token = self._sending.start_beside(own, number)

    def mix_in(self) -> None:
        """Mixes the global weights into the local ones, once they have come."""
        if self._token is not None:
            wait_for_background(self._token)
            self._token = None
        if self._mixing is None:
            self._mixing = FollowUpProgram(self._strategy, self._functions.mix_in_fragment)
        self._mixing.run_after_step()


class _Functions:
    """The replica functions of a fragment."""

    def __init__(self, trained: list[Any], method: LocalUpdates) -> None:
        self._trained = trained
        self._method = method

    def send_fragment(self, own: list[Any], step: Any) -> None:
        """Sums the changes of the replicas, and sets the global weights."""
        context = _replica()
        with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
            values, states = read_global(self._trained)
            found = next_globals(self._trained, own, values, states, self._method, context, step)
            assign_global(self._trained, *found)

    def mix_in_fragment(self) -> None:
        """Mixes the global weights into those of this replica."""
        context = _replica()
        with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
            values, _ = read_global(self._trained)
            own = [one.local_copy.value for one in self._trained]
            for variable, new in zip(self._trained, mixed(own, values, self._method), strict=True):
                variable.local_copy.assign(new)


def _replica() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


@jax.jit
def _copied(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(one) for one in arrays]

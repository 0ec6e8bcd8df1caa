"""State of the step that a thread traces or runs, with the mode of its losses.

The modes make losses of replicas match the loss of one device.

SHARE: a replica's loss is its share of the loss of the global batch, so that losses and gradients
sum to the whole. Exact for masks and weights, because every divisor counts all replicas.

MEAN: a replica's loss is the mean over its own examples; gradients are averaged by the number of
true examples. For models with a custom `train_step` or `compute_loss`, which compute means. What
is known as a share, such as that of a Keras loss, is divided by the replica's fraction of the
examples, so that the average of the replicas is the sum of the shares.

WHOLE: this replica computes with the rows of all replicas, as one device does, without collectives.

OWN: a custom step (`strategy.run`); the user's code defines the loss.

Where the workers of parameter servers share each batch, this worker's gradients are multiplied by
its share of the batch, and added to those of the others. So its loss is that of its part, except
that the denominators of a mean are those of the whole batch, times the share.

Where replicas train apart, the global batch of a training step of `fit` is that of an island.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.execution.tracing.remote_state import BatchShare, Summand, SumOverWorkers

if TYPE_CHECKING:
    import keras
    from jax.typing import ArrayLike, DTypeLike


class StepMode(enum.Enum):
    """Loss modes; the module docstring describes them."""

    OWN = "own"
    SHARE = "share"
    MEAN = "mean"
    WHOLE = "whole"


@dataclasses.dataclass(frozen=True)
class StepState:
    """The step that this thread traces or runs: its loss mode, and what is under way in it."""

    mode: StepMode = StepMode.OWN
    loss_trackers: frozenset[int] = frozenset()  # ids of metrics that Keras updates with losses
    trains_apart: bool = False  # True in a training step of islands
    shares_batches: bool = False  # True for workers that share each batch
    is_in_loss: bool = False  # True within a loss: those in it count the rows that they get
    # Values of the terms of a step, while it is traced for these only; see `step_terms.py`.
    recorded: list[list[Any]] | None = None
    terms: Iterator[tuple[list[bool], list[bool]]] | None = None
    reported: dict[int, Any] | None = None  # results of metrics for all replicas, as requested
    updates_metric: bool = False
    are_gradients_reduced: bool = False  # True if they are over replicas already
    is_recomputed: bool = False  # True in a call that is computed again in the backward pass


_OUTSIDE = StepState()
_state: ContextVar[StepState] = ContextVar("step")


def step_state() -> StepState:
    """Returns the state of this thread's step."""
    return _state.get(_OUTSIDE)


@contextlib.contextmanager
def in_step(**changes: Any) -> Generator[StepState]:
    """Changes fields of the state in a `with` block."""
    state = dataclasses.replace(step_state(), **changes)
    token = _state.set(state)
    try:
        yield state
    finally:
        _state.reset(token)


def step_mode(
    mode: StepMode,
    loss_trackers: Sequence[Any] = (),
    *,
    trains_apart: bool = False,
    shares_batches: bool = False,
) -> contextlib.AbstractContextManager[StepState]:
    """Sets the mode in a `with` block; `loss_trackers` are metrics, one per output."""
    return in_step(
        mode=mode,
        loss_trackers=frozenset(map(id, loss_trackers)),
        trains_apart=trains_apart,
        shares_batches=shares_batches,
    )


def taking_shares() -> contextlib.AbstractContextManager[StepState]:
    """Computes shares in a `with` block of MEAN mode."""
    return in_step(mode=StepMode.SHARE)


def computing_loss() -> contextlib.AbstractContextManager[StepState]:
    """Makes losses within a loss, in a `with` block, those of one device that has these rows."""
    return in_step(is_in_loss=True)


def is_of_one_device() -> bool:
    """Returns True where a loss counts the rows that it is given, as on one device."""
    state = step_state()
    is_in_loss = state.is_in_loss and state.mode is not StepMode.OWN
    return is_in_loss or state.mode is StepMode.WHOLE


def is_loss_tracker(metric: object) -> bool:
    """Returns True if Keras updates a metric with this replica's share of the loss in this step."""
    return step_state().mode is StepMode.SHARE and id(metric) in step_state().loss_trackers


def record_loss(tracker: keras.metrics.Mean, loss: ArrayLike, context: ReplicaContext) -> None:
    """Adds a step's loss to its `Mean` metric, so that the result matches a single device.

    `loss` is this replica's share of the loss, or the mean over its own examples.
    """
    examples = jnp.asarray(context.num_examples, tracker.dtype)
    whole = context.island if step_state().trains_apart else context
    weight = whole.global_num_examples if step_state().mode is StepMode.SHARE else examples
    tracker.total.assign_add(jnp.asarray(loss, tracker.dtype) * jnp.asarray(weight, tracker.dtype))
    tracker.count.assign_add(examples)


def current_mode() -> StepMode:
    """Returns the mode of this thread."""
    return step_state().mode


def replica_context() -> ReplicaContext | None:
    """Returns the context of a replica among several or with a padded batch; else None."""
    if step_state().mode is StepMode.WHOLE:
        return None
    context = get_replica_context()
    if context is None or (context.num_replicas_in_sync == 1 and not context.batch.is_padded):
        return None
    return context


def shares_batches() -> bool:
    """Returns True if this worker computes a part of the batch, and other workers the rest."""
    return step_state().shares_batches and step_state().mode is not StepMode.WHOLE


def loss_context() -> ReplicaContext | None:
    """Returns what `lockstep_context` does, and also the sole replica of a worker in a batch."""
    return get_replica_context() if shares_batches() else lockstep_context()


def sum_over_workers(value: jax.Array) -> jax.Array:
    """Returns the sum over the workers that share a batch, times this worker's share.

    `value` is the same on all replicas of this worker; workers without rows do not count.
    """
    if not shares_batches():
        return value
    scope = current_scope()
    assert scope is not None
    receive = scope.outermost.receive
    assert receive is not None
    place, total = receive(SumOverWorkers(None, value.shape, jnp.dtype("float32")))
    scope.send(Summand(place), value.astype("float32"))
    return (total * _share()).astype(value.dtype)


def as_sum_over_workers(total: jax.Array) -> jax.Array:
    """Returns a sum over this worker's rows, for gradients that are multiplied by its share."""
    if not shares_batches():
        return total
    share = _share().astype(total.dtype)
    return jnp.where(share == 0, 0, total / jnp.where(share == 0, 1, share))


def batch_fraction(context: ReplicaContext, dtype: DTypeLike) -> Any:
    """Returns `example_fraction`, of the batch of all workers that share it."""
    fraction = example_fraction(context, dtype)
    return fraction * _share().astype(dtype) if shares_batches() else fraction


def _share() -> jax.Array:
    scope = current_scope()
    assert scope is not None
    receive = scope.outermost.receive
    assert receive is not None
    return receive(BatchShare(None, (), jnp.dtype("float32")))[1]


def lockstep_context() -> ReplicaContext | None:
    """Returns the context of the replicas that share a loss: in training, those of an island.

    None like `replica_context`.
    """
    context = replica_context()
    if context is None or not step_state().trains_apart:
        return context
    island = context.island
    return None if island.num_replicas_in_sync == 1 and not island.batch.is_padded else island


def example_fraction(context: ReplicaContext, dtype: DTypeLike) -> Any:
    """Returns this replica's fraction of the step's true examples, in a floating dtype.

    Without examples all replicas have the same fraction.
    """
    if context.batch.fraction is not None:
        return jnp.asarray(context.batch.fraction, dtype)
    equal = jnp.asarray(1.0 / context.num_replicas_in_sync, dtype)
    if not context.batch.is_padded or not context.batch.has_examples:
        return equal
    own = jnp.asarray(context.num_examples, dtype)
    total = jnp.asarray(context.global_num_examples, dtype)
    if not context.batch.choices:
        return own / total
    return jnp.where(total == 0, equal, own / jnp.maximum(total, 1))


def as_average(share: jax.Array, context: ReplicaContext) -> Any:
    """Returns the value whose average over replicas, by examples, is the sum of their shares."""
    fraction = example_fraction(context, share.dtype)
    return jnp.where(fraction == 0, 0, share / jnp.where(fraction == 0, 1, fraction))

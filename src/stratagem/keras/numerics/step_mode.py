"""Loss modes of a training step, which make losses of replicas match the loss of one device.

SHARE: a replica's loss is its share of the loss of the global batch, so that losses and gradients
sum to the whole. Exact for masks and weights, because every divisor counts all replicas.

MEAN: a replica's loss is the mean over its own examples; gradients are averaged by the number of
true examples. For models with a custom `train_step` or `compute_loss`, which compute means. What
is known as a share, such as that of a Keras loss, is divided by the replica's fraction of the
examples, so that the average of the replicas is the sum of the shares.

WHOLE: this replica computes with the rows of all replicas, as one device does, without collectives.

OWN: a custom step (`strategy.run`); the user's code defines the loss.

Where replicas train apart, the global batch of a training step of `fit` is that of an island.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from stratagem.context import ReplicaContext, get_replica_context

if TYPE_CHECKING:
    import jax
    import keras
    from jax.typing import ArrayLike, DTypeLike


__all__ = [
    "StepMode",
    "as_average",
    "computing_loss",
    "current_mode",
    "example_fraction",
    "has_part_of_batch",
    "is_loss_tracker",
    "is_of_one_device",
    "lockstep_context",
    "record_loss",
    "replica_context",
    "step_mode",
    "taking_shares",
]


class StepMode(enum.Enum):
    """Loss modes; the module docstring describes them."""

    OWN = "own"
    SHARE = "share"
    MEAN = "mean"
    WHOLE = "whole"


class _CurrentMode(threading.local):
    mode: StepMode = StepMode.OWN
    loss_trackers: frozenset[int] = frozenset()
    trains_apart: bool = False
    trains: bool = False
    is_in_loss: bool = False


_current: _CurrentMode = _CurrentMode()


@contextlib.contextmanager
def step_mode(
    mode: StepMode,
    loss_trackers: Sequence[Any] = (),
    *,
    trains: bool = False,
    trains_apart: bool = False,
) -> Generator[None]:
    """Sets the mode in a `with` block.

    Args:
        mode: the mode.
        loss_trackers: metrics that Keras itself updates with losses, one per output.
        trains: True in a training step of `fit`.
        trains_apart: True in one of islands.
    """
    previous = _current.mode, _current.loss_trackers, _current.trains, _current.trains_apart
    _current.mode = mode
    _current.loss_trackers = frozenset(id(tracker) for tracker in loss_trackers)
    _current.trains, _current.trains_apart = trains, trains_apart
    try:
        yield
    finally:
        _current.mode, _current.loss_trackers = previous[:2]
        _current.trains, _current.trains_apart = previous[2:]


@contextlib.contextmanager
def taking_shares() -> Generator[None]:
    """Computes shares in a `with` block of MEAN mode."""
    previous, _current.mode = _current.mode, StepMode.SHARE
    try:
        yield
    finally:
        _current.mode = previous


@contextlib.contextmanager
def computing_loss() -> Generator[None]:
    """Makes losses within a loss, in a `with` block, those of one device that has these rows."""
    previous, _current.is_in_loss = _current.is_in_loss, True
    try:
        yield
    finally:
        _current.is_in_loss = previous


def is_of_one_device() -> bool:
    """Returns True where a loss counts the rows that it is given, as on one device."""
    is_in_loss = _current.is_in_loss and _current.mode is not StepMode.OWN
    return is_in_loss or _current.mode is StepMode.WHOLE


def has_part_of_batch(context: ReplicaContext) -> bool:
    """Returns True in a training step of `fit` of one of several workers that share its batch."""
    placement = context.strategy.placement
    return _current.trains and placement.is_remote and placement.remote.is_synchronous


def is_loss_tracker(metric: object) -> bool:
    """Returns True if Keras updates a metric with this replica's share of the loss in this step."""
    return _current.mode is StepMode.SHARE and id(metric) in _current.loss_trackers


def record_loss(tracker: keras.metrics.Mean, loss: ArrayLike, context: ReplicaContext) -> None:
    """Adds a step's loss to its `Mean` metric, so that the result matches a single device.

    `loss` is this replica's share of the loss, or the mean over its own examples.
    """
    examples = jnp.asarray(context.num_examples, tracker.dtype)
    whole = context.island if _current.trains_apart else context
    weight = whole.global_num_examples if _current.mode is StepMode.SHARE else examples
    tracker.total.assign_add(jnp.asarray(loss, tracker.dtype) * jnp.asarray(weight, tracker.dtype))
    tracker.count.assign_add(examples)


def current_mode() -> StepMode:
    """Returns the mode of this thread."""
    return _current.mode


def replica_context() -> ReplicaContext | None:
    """Returns the context of a replica among several or with a padded batch; else None."""
    if _current.mode is StepMode.WHOLE:
        return None
    context = get_replica_context()
    if context is None or (context.num_replicas_in_sync == 1 and not context.batch.is_padded):
        return None
    return context


def lockstep_context() -> ReplicaContext | None:
    """Returns the context of the replicas that share a loss: in training, those of an island.

    None like `replica_context`.
    """
    context = replica_context()
    if context is None or not _current.trains_apart:
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

"""Losses over replicas: Keras losses in `fit`, `compute_average_loss`, `scale_regularization_loss`.

In a replica function a Keras loss counts true examples, and in `fit` it divides by the examples of
all replicas.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer
from keras import ops

from stratagem.errors import InvalidArgumentError, explain, invalid
from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.row_effects import RowEffect
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.numerics.layers import (
    first_rows,
    gathered_rows,
    num_rows,
    true_rows,
    whole_batch,
    with_gradient_times,
    with_known_rows,
)
from stratagem.keras.numerics.metrics import effect_of_loss
from stratagem.keras.numerics.step_mode import (
    StepMode,
    as_average,
    as_sum_over_workers,
    computing_loss,
    current_mode,
    example_fraction,
    is_of_one_device,
    loss_context,
    replica_context,
    shares_batches,
    sum_over_workers,
    taking_shares,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    apply_mask,
    get_keras_mask,
    get_stateless_scope,
    squeeze_or_expand_to_same_rank,
)
from stratagem.logs import warn_on_one_worker
from stratagem.options import ReduceOp

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_AVERAGING = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@patches(
    keras.losses.Loss,
    "__call__",
    why="the mean of a loss is over the examples of all replicas, without padding",
)
def replica_loss(original: Callable[..., Any]) -> Any:
    """Returns `Loss.__call__` that counts examples over replicas."""

    def call(
        self: keras.losses.Loss, y_true: object, y_pred: object, sample_weight: object = None
    ) -> Any:
        if is_of_one_device():
            return original(self, y_true, y_pred, sample_weight)
        is_own = current_mode() is StepMode.OWN
        context = replica_context() if is_own else loss_context()
        if context is None:
            return original(self, y_true, y_pred, sample_weight)
        in_replica = _LossCall(self, y_true, y_pred, sample_weight)
        if not is_own:
            return in_replica.of_step(context)
        if self.reduction in _AVERAGING:
            _warn_about_averaging(self, context)
        effect = effect_of_loss(self, y_true, y_pred, context)
        if effect is RowEffect.MIXED and context.num_replicas_in_sync > 1:
            _warn_about_pairs(self, context)
        if not context.batch.is_padded:
            return original(self, y_true, y_pred, sample_weight)
        return in_replica.value(context, effect)

    return call


def _warn_about_averaging(loss: keras.losses.Loss, context: ReplicaContext) -> None:
    if context.num_replicas_in_sync > 1:
        warn_on_one_worker(
            explain(
                f"The loss {loss.name!r} averages over this replica's examples in a custom step.",
                expected="per-example losses: gradients are summed over "
                f"{context.num_replicas_in_sync} replicas, so averages count "
                f"{context.num_replicas_in_sync} times too much.",
                fix="create the loss with reduction=None and use sg.compute_average_loss.",
                code="SG409",
            ),
            UserWarning,
            stacklevel=4,
        )


def _warn_about_pairs(loss: keras.losses.Loss, context: ReplicaContext) -> None:
    warn_on_one_worker(
        explain(
            f"The loss {loss.name!r} compares examples with one another in a custom step.",
            expected="a loss that is a sum over examples: each of the "
            f"{context.num_replicas_in_sync} replicas compares only its own examples.",
            fix="gather the examples of all replicas first: sg.all_gather(value, axis=0).",
        ),
        UserWarning,
        stacklevel=4,
    )


def _warn_about_shared_pairs(loss: keras.losses.Loss) -> None:
    warn_on_one_worker(
        explain(
            f"The loss {loss.name!r} is not a sum over examples, but synchronous workers share "
            "each batch.",
            expected="a loss that is a sum or a mean over examples: each worker computes this one "
            "of its own part, and the mean of these differs from the loss of the whole batch.",
            fix="return one loss per example, with a mask as sample_weight; or train with one "
            "worker of several devices.",
            code="SG409",
        ),
        UserWarning,
        stacklevel=4,
    )


@dataclasses.dataclass(frozen=True)
class _LossCall:
    """A call of a Keras loss in a replica."""

    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any
    sample_weight: Any

    def of_step(self, lockstep: ReplicaContext) -> Any:
        """Returns this replica's term of the loss of the replicas in lockstep: its share in SHARE.

        In MEAN mode, where the step takes the average by examples of the terms, a share is scaled.
        """
        is_averaged = current_mode() is StepMode.MEAN
        terms: list[Any] = []
        # A loss may contain a collective, so branches by the rows of an island would deadlock.
        for context in with_known_rows(lockstep):
            with taking_shares():
                effect = effect_of_loss(self.loss, self.y_true, self.y_pred, context)
                is_of_pairs = effect is RowEffect.MIXED
                if is_of_pairs and shares_batches():
                    _warn_about_shared_pairs(self.loss)
                if is_of_pairs and self.loss.reduction not in (None, "none"):
                    term = self._of_whole_batch(context, is_averaged=is_averaged)
                else:
                    if is_of_pairs and is_averaged and context.num_replicas_in_sync > 1:
                        _warn_about_pairs(self.loss, context)
                    term = self.value(context, effect)
                    if is_averaged and term.ndim == 0:
                        term = as_average(term, context)
            terms.append(term)
        return terms[0] if len(terms) == 1 else jax.lax.select_n(lockstep.batch.choice, *terms)

    def _of_whole_batch(self, context: ReplicaContext, *, is_averaged: bool) -> Any:
        """Returns this replica's share, 1/n, of a loss in which examples depend on one another.

        The gradient of the gather sums the contributions of all replicas to this replica's rows. If
        replicas are averaged by examples, each returns the loss, and scales the gradient of its
        rows.
        """
        rows = num_rows(jax.tree.leaves(self.y_pred)[0], context)
        given = (self.y_true, self.y_pred, self.sample_weight)
        if is_averaged:
            factor = as_average(jnp.ones(()) / context.num_replicas_in_sync, context)
            given = with_gradient_times(given, factor)
        gathered = [gathered_rows(value, context, rows) for value in given]
        if not context.batch.has_examples:  # an island's: its gathers stay those of the others
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(gathered[1])) * 0.0
        with whole_batch(context):
            value = cast("jax.Array", self.loss(*gathered))
        return value if is_averaged else value / context.num_replicas_in_sync

    def value(self, context: ReplicaContext, effect: RowEffect) -> Any:
        """Mirrors Keras's `Loss.__call__`, but drops padding and counts all replicas."""
        loss, in_mask = self.loss, get_keras_mask(self.y_pred)
        with keras.name_scope(loss.name):
            y_pred, y_true = (jax.tree.map(self._converted, x) for x in (self.y_pred, self.y_true))
            with computing_loss():
                values = loss.call(y_true, y_pred)
            masks = [mask for mask in (in_mask, get_keras_mask(values)) if mask is not None]
            values = jnp.asarray(self._converted(values))
            if values.ndim == 0:
                if context.batch.is_padded:
                    values = self._of_true_rows(y_true, y_pred, values, context)
                if self.sample_weight is not None:
                    values *= self._weight_of_batch(values.dtype, context)
                if current_mode() is not StepMode.SHARE:
                    return values
                if effect is RowEffect.SUM:
                    return as_sum_over_workers(values)
                return values * example_fraction(context, values.dtype)
            mask = masks[0] & masks[1] if len(masks) == 2 else (masks[0] if masks else None)
            weights = apply_mask(self.sample_weight, mask, dtype=values.dtype, reduction="sum")
            return _reduce(loss.reduction, values, weights, mask, context)

    def _converted(self, values: object) -> Any:
        return ops.convert_to_tensor(values, dtype=self.loss.dtype)

    def _weight_of_batch(self, dtype: DTypeLike, context: ReplicaContext) -> Any:
        """Returns Keras's factor for a scalar loss: the mean or the sum of the weights."""
        weights = jnp.asarray(self.sample_weight, dtype)
        if weights.ndim == 0:
            return weights
        if self.loss.reduction not in ("sum", "sum_over_batch_size", "mean"):
            return jnp.ones((), dtype)
        share = current_mode() is StepMode.SHARE
        total = jnp.sum(true_rows(weights, context))
        if share:
            total = context.communicator.all_reduce(ReduceOp.SUM, jax.lax.stop_gradient(total))
        if self.loss.reduction == "sum":
            return as_sum_over_workers(sum_over_workers(total)) if share else total
        if share:
            total = sum_over_workers(total)
        number = jnp.asarray(_num_elements(weights, context, share=share), dtype)
        return total / jnp.maximum(number, 1)

    def _of_true_rows(
        self, y_true: object, y_pred: object, of_all_rows: jax.Array, context: ReplicaContext
    ) -> jax.Array:
        """Recomputes a scalar loss of a batch, such as a mean, without padding rows.

        Each replica computes it for every number of rows of any replica and selects its own: the
        loss may contain a collective, which needs all replicas, so branches would deadlock.
        """
        result = jnp.zeros_like(of_all_rows)
        rows = num_rows(jax.tree.leaves(y_pred)[0], context)
        for length in sorted(set(context.batch.lengths or ()) - {0}):
            cut = [first_rows(value, length, context, rows) for value in (y_true, y_pred)]
            with computing_loss():
                value = jnp.asarray(self._converted(self.loss.call(*cut)))
            result = jnp.where(context.num_examples == length, value, result)
        return result


def _reduce(
    reduction: str | None,
    values: jax.Array,
    weights: object,
    mask: jax.Array | None,
    context: ReplicaContext,
) -> Any:
    factors = None
    if weights is not None:
        pair = squeeze_or_expand_to_same_rank(values, ops.cast(weights, values.dtype))
        values, factors = cast("tuple[jax.Array, jax.Array]", pair)
        values = values * factors
    values = true_rows(values, context)
    if reduction in (None, "none"):
        return values
    total = jnp.sum(values)
    if reduction == "sum":
        return as_sum_over_workers(total) if current_mode() is StepMode.SHARE else total
    divisor = _divisor(reduction, values, factors, mask, context)
    return jnp.where(divisor == 0, 0.0, total / jnp.where(divisor == 0, 1, divisor)).astype(
        total.dtype
    )


def _divisor(
    reduction: str,
    values: jax.Array,
    weights: jax.Array | None,
    mask: jax.Array | None,
    context: ReplicaContext,
) -> Any:
    """Returns the divisor of a mean: over all replicas in SHARE mode, else over this one."""
    share = current_mode() is StepMode.SHARE
    if reduction == "mean_with_sample_weight" and weights is not None:
        local = jnp.sum(true_rows(weights, context))
    elif mask is not None:
        true = true_rows(cast("jax.Array", ops.cast(mask, values.dtype)), context)
        local = jnp.sum(true) * (values.size / max(mask.size, 1))  # a replica without rows
    else:
        return jnp.asarray(_num_elements(values, context, share=share), values.dtype)
    if not share:
        return local
    local = context.communicator.all_reduce(ReduceOp.SUM, jax.lax.stop_gradient(local))
    return sum_over_workers(local)


def _num_elements(values: jax.Array, context: ReplicaContext, *, share: bool) -> Any:
    """Counts the true elements of losses, of all replicas or of this one."""
    rows: Any = context.global_num_examples if share else context.num_examples
    if rows is None or values.shape[0] != context.batch.size:
        return values.size * (context.num_replicas_in_sync if share else 1)
    return rows * (values.size // values.shape[0] if values.shape[0] else 0)


def compute_average_loss(
    per_example_loss: object,
    sample_weight: object = None,
    global_batch_size: SupportsIndex | None = None,
) -> jax.Array:
    """Scales per-example losses so that the sum over replicas is their average.

    Call in replica context, or in any context with `global_batch_size`. A step of `fit` or
    `evaluate` (`train_step`, `compute_loss`, a layer's `add_loss`) takes the average of the
    replicas by examples instead of their sum: there, and in a loss given to `compile`, the value
    is scaled so that losses and gradients are those of one device.

    Args:
        per_example_loss: this replica's losses, shape (per_replica_batch, ...).
        sample_weight: weights, broadcast against the losses.
        global_batch_size: divisor; None for the number of true examples that all replicas have.

    Returns:
        Scalar of the dtype of the losses: their sum without padding, divided by the batch size; 0
        if the batch size is 0. In a step of `fit`, divided also by this replica's fraction of the
        examples.

    Raises:
        ValueError: the loss is a scalar.
        TypeError: `global_batch_size` is not an integer scalar.
        InvalidArgumentError: `global_batch_size` is negative.
        RuntimeError: called in cross-replica context without `global_batch_size`.

    Example:
        >>> sg.compute_average_loss(jax.numpy.array([1.0, 2.0, 3.0]), global_batch_size=8)
        Array(0.75, dtype=float32)

    Source: TF 2.21 nn_impl_distribute.py, compute_average_loss.
    """
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise invalid(
            "compute_average_loss received a scalar loss.",
            expected="one loss per example, shape (per_replica_batch, ...).",
            fix="create the Keras loss with reduction=None.",
            code="SG409",
        )
    is_alone = is_of_one_device() or _is_built_outside_replicas()
    context = None if is_alone else get_replica_context()
    is_whole = global_batch_size is not None
    if global_batch_size is None:
        global_batch_size = losses.shape[0] if is_alone else _num_examples(losses, context)
    divisor = _check_batch_size(global_batch_size, losses.dtype)
    if sample_weight is not None:
        losses = losses * jnp.asarray(sample_weight, losses.dtype)
    if context is not None:
        losses = true_rows(losses, context)
    total = jnp.sum(losses)
    share = jnp.where(divisor == 0, jnp.zeros_like(total), total / jnp.maximum(divisor, 1))
    if context is None or current_mode() is StepMode.OWN:
        return share
    return as_average(as_sum_over_workers(share) if is_whole else share, context)


def _is_built_outside_replicas() -> bool:
    """Returns True where Keras traces a model in cross-replica context, as to build it."""
    is_stateless = get_stateless_scope() is not None and current_scope() is None
    return is_stateless and get_replica_context() is None


def _num_examples(losses: jax.Array, context: ReplicaContext | None) -> SupportsIndex:
    """Returns the number of true examples of all replicas."""
    if context is None:
        raise RuntimeError(
            explain(
                "compute_average_loss was called in cross-replica context without "
                "global_batch_size.",
                expected="replica context, where the number of examples is known.",
                fix="call it in the replica function, or pass global_batch_size.",
                code="SG405",
            )
        )
    rows = num_rows(losses, context)
    if rows is None or not context.batch.size:
        return losses.shape[0] * context.num_replicas_in_sync
    return context.global_num_examples * (rows // context.batch.size)


def _check_batch_size(global_batch_size: SupportsIndex, dtype: DTypeLike) -> jax.Array:
    """Returns the batch size as a scalar of the losses' dtype."""
    size = global_batch_size
    if not isinstance(size, Tracer):
        try:
            size = operator.index(global_batch_size)
        except TypeError:
            size = None
    is_integer = (
        size is not None and jnp.shape(size) == () and not isinstance(global_batch_size, bool)
    )
    if not is_integer or not jnp.issubdtype(jnp.result_type(size), jnp.integer):
        raise TypeError(
            explain(
                f"compute_average_loss received global_batch_size={global_batch_size!r}.",
                expected="an integer scalar.",
                fix="pass the global batch size as an int.",
            )
        )
    if isinstance(size, int) and size < 0:
        raise InvalidArgumentError(
            explain(
                f"compute_average_loss received global_batch_size={size}.",
                expected="a number of examples, 0 or more.",
                fix="pass the global batch size.",
            )
        )
    return jnp.asarray(size, dtype)


def scale_regularization_loss(regularization_loss: object) -> jax.Array:
    """Divides a loss that is equal on every replica by the number of replicas.

    Call in replica context. A step of `fit` or `evaluate` takes the average of the replicas: there
    the loss is not divided.

    Args:
        regularization_loss: scalar, array or list of them, such as `model.losses`.

    Returns:
        Scalar: the sum of the losses divided by the number of replicas, so that the sum over
        replicas is the original loss. In a step of `fit`, the sum of the losses.

    Raises:
        RuntimeError: called in cross-replica context.

    Example:
        >>> sg.scale_regularization_loss(jax.numpy.array([1.0, 2.0]))
        Array(3., dtype=float32)

    Source: TF 2.21 nn_impl_distribute.py, scale_regularization_loss.
    """
    context = get_replica_context()
    is_alone = is_of_one_device() or _is_built_outside_replicas()
    if context is None and not is_alone:
        raise RuntimeError(
            explain(
                "scale_regularization_loss was called in cross-replica context.",
                expected="replica context.",
                fix="call it in the function passed to strategy.run.",
                code="SG405",
            )
        )
    total = sum(
        (jnp.sum(jnp.asarray(leaf)) for leaf in jax.tree.leaves(regularization_loss)), jnp.zeros(())
    )
    if context is None or is_alone or current_mode() is not StepMode.OWN:
        return total
    return total / context.num_replicas_in_sync

"""PoissonRegressionHead and LogisticRegressionHead: counts and proportions."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.regression import RegressionHead
from stratagem.messages import explain


class PoissonRegressionHead(RegressionHead):
    """Head for counts: the logit is the log of their mean.

    Args:
        label_dimension: the number of counts per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
        compute_full_loss: True to add Stirling's approximation of log(labels!), which has no
            gradient.
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if `label_dimension` is below 1 or the reduction is unknown.

    Example:
        >>> head = sg.estimator.PoissonRegressionHead()
        >>> float(head.predictions(np.zeros((1, 1), "float32"))["predictions"][0, 0])
        1.0

    Source: tensorflow/estimator regression_head.py, PoissonRegressionHead; TF 2.21 nn_impl.py,
    log_poisson_loss.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        compute_full_loss: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(
            label_dimension, weight_column, loss_reduction, inverse_link_fn=jnp.exp, name=name
        )
        self._compute_full_loss = compute_full_loss

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32 and checks that they are not negative."""
        counts = super().encode_labels(labels)
        if np.any(counts < 0):
            raise ValueError(
                explain(
                    f"Labels of a Poisson regression include {counts.min()}.",
                    expected="counts of at least 0.",
                    fix="use a RegressionHead for other numbers.",
                )
            )
        return counts

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        losses = jnp.exp(logits) - labels * logits
        if not self._compute_full_loss:
            return losses
        above = jnp.maximum(labels, 1.0)  # keeps log(0) out of both branches
        stirling = above * jnp.log(above) - above + 0.5 * jnp.log(2 * math.pi * above)
        return losses + jnp.where(labels > 1, stirling, 0.0)


class LogisticRegressionHead(RegressionHead):
    """Head for proportions from 0 to 1: the loss is the cross-entropy.

    Args:
        label_dimension: the number of proportions per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if `label_dimension` is below 1 or the reduction is unknown.

    Example:
        >>> head = sg.estimator.LogisticRegressionHead()
        >>> float(head.predictions(np.zeros((1, 1), "float32"))["predictions"][0, 0])
        0.5

    Source: tensorflow/estimator regression_head.py, LogisticRegressionHead.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(
            label_dimension,
            weight_column,
            loss_reduction,
            inverse_link_fn=jax.nn.sigmoid,
            name=name,
        )

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32 and checks that they are from 0 to 1."""
        proportions = super().encode_labels(labels)
        if np.any((proportions < 0) | (proportions > 1)):
            raise ValueError(
                explain(
                    f"Labels of a logistic regression range from {proportions.min()} to "
                    f"{proportions.max()}.",
                    expected="proportions from 0 to 1.",
                    fix="divide the labels by their totals.",
                )
            )
        return proportions

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return jnp.logaddexp(0.0, logits) - labels * logits

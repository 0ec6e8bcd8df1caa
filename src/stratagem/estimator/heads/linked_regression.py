"""Heads for numbers whose prediction is a function of the logit: counts and proportions."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.regression import RegressionHead
from stratagem.messages import explain

__all__ = ["LogisticRegressionHead", "PoissonRegressionHead"]


class PoissonRegressionHead(RegressionHead):
    """The head of models that predict counts: the log of their mean is the logit.

    Args:
        label_dimension: counts that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
        compute_full_loss: whether the loss has Stirling's approximation of the log of the labels'
            factorials, which no gradient depends on.
        name: put behind the names of metrics.

    Raises:
        TypeError: a `weight_column` of another type.
        ValueError: no positive dimension, or another reduction.

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

    def encode_labels(self, labels: Any) -> np.ndarray:
        """Returns labels as float32.

        Raises:
            ValueError: labels that are no numbers, or below 0.
        """
        counts = super().encode_labels(labels)
        if np.any(counts < 0):
            raise ValueError(
                explain(
                    f"Labels of a Poisson regression go down to {counts.min()}.",
                    expected="counts: numbers of 0 and more.",
                    fix="use a RegressionHead for other numbers.",
                )
            )
        return counts

    def _own_loss(self, labels: Any, logits: Any) -> Any:
        losses = jnp.exp(logits) - labels * logits
        if not self._compute_full_loss:
            return losses
        above = jnp.maximum(labels, 1.0)  # so that no branch has the log of 0
        stirling = above * jnp.log(above) - above + 0.5 * jnp.log(2 * math.pi * above)
        return losses + jnp.where(labels > 1, stirling, 0.0)


class LogisticRegressionHead(RegressionHead):
    """The head of models that predict proportions, numbers from 0 to 1: the crossentropy.

    Args:
        label_dimension: proportions that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
        name: put behind the names of metrics.

    Raises:
        TypeError: a `weight_column` of another type.
        ValueError: no positive dimension, or another reduction.

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

    def encode_labels(self, labels: Any) -> np.ndarray:
        """Returns labels as float32.

        Raises:
            ValueError: labels that are no numbers, or not from 0 to 1.
        """
        proportions = super().encode_labels(labels)
        if np.any((proportions < 0) | (proportions > 1)):
            raise ValueError(
                explain(
                    f"Labels of a logistic regression are from {proportions.min()} to "
                    f"{proportions.max()}.",
                    expected="proportions from 0 to 1.",
                    fix="divide them by what they are parts of.",
                )
            )
        return proportions

    def _own_loss(self, labels: Any, logits: Any) -> Any:
        return jnp.logaddexp(0.0, logits) - labels * logits

"""`AUC` by buckets, with bounds of the exact value."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from stratagem.errors import explain

# Float32 adds numbers exactly up to 2**24. Counts are kept in two numbers: multiples of this one,
# and a rest, so that those of up to 2**36 examples are exact in each bucket.
_CARRY = 4096.0
# Logits beyond are in the last bucket: probabilities below 6e-6 or above 1 - 6e-6.
_LARGEST_LOGIT = 12.0


@keras.saving.register_keras_serializable("stratagem")
class AUC(keras.metrics.Metric):
    """Area under the ROC curve by buckets of predictions, with bounds of the exact value.

    The exact AUC is the probability that a positive example has a higher prediction than a negative
    one, with one half for ties. This metric counts both kinds in buckets of predictions. Pairs in
    different buckets are ordered exactly; of pairs in the same bucket, it takes one half. So the
    result is wrong by at most half of the share of such pairs, `error_bound()`, which some data
    attain. The counts are sums, so they are the same for any number of replicas and workers.

    `keras.metrics.AUC` interpolates between thresholds and gives no bound.

    A prediction that is not a number makes the result not a number. Several outputs of an example
    count as examples of their own.

    Args:
        num_buckets: number of buckets of equal width. Two numbers of 4 bytes are kept of each, for
            positive and for negative examples.
        from_logits: True for predictions that are logits, with buckets between -12 and 12. It
            resolves rare classes better than probabilities do.
        name: name in logs.
        dtype: as for other Keras metrics.

    Raises:
        ValueError: fewer than 2 buckets.

    Example:
        >>> auc = sg.embedding.AUC(num_buckets=10)
        >>> auc.update_state([0, 0, 1, 1], [0.12, 0.35, 0.31, 0.8])
        >>> round(float(auc.result()), 3), round(auc.error_bound(), 3)
        (0.875, 0.125)

    Source: specific to Stratagem; the definition is that of Mann and Whitney (1947).
    """

    def __init__(
        self,
        num_buckets: int = 10_000,
        from_logits: bool = False,
        name: str = "auc",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        if num_buckets < 2:
            raise ValueError(
                explain(
                    f"AUC received num_buckets={num_buckets!r}.",
                    expected="at least 2 buckets.",
                    fix="omit num_buckets for 10,000.",
                )
            )
        self.num_buckets = num_buckets
        self.from_logits = from_logits
        self.carried = self.add_variable((2, num_buckets), "zeros", "float32", name="carried")
        self.rest = self.add_variable((2, num_buckets), "zeros", "float32", name="rest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Counts the examples of a batch.

        Args:
            y_true: labels; above 0 is positive.
            y_pred: predictions, probabilities or logits, of the same number of elements.
            sample_weight: weights, one for each example or prediction. Whole numbers are added
                exactly.
        """
        predicted: Any = ops.convert_to_tensor(y_pred, "float32")
        weights: Any = ops.ones_like(predicted)
        if sample_weight is not None:
            given: Any = ops.convert_to_tensor(sample_weight, "float32")
            is_whole = math.prod(given.shape) == math.prod(predicted.shape)
            ones = [1] * (len(predicted.shape) - len(given.shape))
            shape = predicted.shape if is_whole else (*given.shape, *ones)
            weights = weights * ops.reshape(given, shape)
        scores: Any = ops.ravel(predicted)
        weights = ops.ravel(weights)
        labels: Any = ops.ravel(ops.convert_to_tensor(y_true))
        is_positive = labels > 0
        weights = ops.where(ops.isnan(scores), float("nan"), weights)
        share: Any = (scores / _LARGEST_LOGIT + 1) / 2 if self.from_logits else scores
        # Rounding keeps the order of predictions, and the bounds need no more.
        clipped: Any = ops.clip(share, 0.0, 1.0)
        buckets: Any = clipped * self.num_buckets
        buckets = ops.cast(ops.minimum(buckets, self.num_buckets - 1), "int32")
        places = ops.where(is_positive, buckets, buckets + self.num_buckets)
        added = ops.segment_sum(weights, places, num_segments=2 * self.num_buckets)
        rest = self.rest + ops.reshape(added, (2, self.num_buckets))
        carried: Any = ops.floor(rest / _CARRY)
        moved = carried * _CARRY
        self.carried.assign(self.carried + moved)
        self.rest.assign(rest - moved)

    def result(self) -> Any:
        """Returns the middle of the bounds, or 0 without examples of both classes."""
        counts = self.carried + self.rest
        shares = counts / ops.maximum(ops.sum(counts, axis=1, keepdims=True), 1.0)
        positive, negative = shares[0], shares[1]
        below = ops.cumsum(negative) - negative
        return ops.sum(positive * (below + negative / 2))

    def bounds(self) -> tuple[float, float]:
        """Returns the least and the greatest AUC that examples with these counts may have.

        Call it outside of compiled functions.

        Returns:
            Two numbers that enclose the exact AUC of the examples; 0 and 1 without examples of both
            classes.
        """
        middle, half = self._middle_and_half()
        return max(0.0, middle - half), min(1.0, middle + half)

    def error_bound(self) -> float:
        """Returns the largest difference between the result and the exact AUC.

        Call it outside of compiled functions.

        Returns:
            Half of the share of pairs of a positive and a negative example in the same bucket.
        """
        return self._middle_and_half()[1]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments."""
        return {
            **super().get_config(),
            "num_buckets": self.num_buckets,
            "from_logits": self.from_logits,
        }

    def _middle_and_half(self) -> tuple[float, float]:
        """Computes in float64, in which counts of up to 2**53 examples are exact."""
        carried, rest = (
            np.asarray(ops.convert_to_numpy(one.value), float) for one in (self.carried, self.rest)
        )
        positive, negative = carried + rest
        pairs = positive.sum() * negative.sum()
        if pairs == 0:
            return 0.5, 0.5
        below = np.cumsum(negative) - negative
        middle = float(positive @ (below + negative / 2) / pairs)
        return middle, float(positive @ negative / 2 / pairs)

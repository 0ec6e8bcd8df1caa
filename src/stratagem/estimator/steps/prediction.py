"""Prediction of an Estimator: a row for each example, in the order of the input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.steps.model_step import ModelStep, reported
from stratagem.keras.step_mode import StepMode, step_mode
from stratagem.messages import explain

__all__ = ["PredictionStep", "batches_of", "check_keys", "examples_of"]


class PredictionStep(ModelStep):
    """Predicts: `spec.predictions` of each replica."""

    mode = ModeKeys.PREDICT

    def step(self, features: Any, labels: Any) -> Any:
        """Returns the predictions of this replica, and what hooks may fetch."""
        with step_mode(StepMode.MEAN):
            call = self.call(features, None)
            named = {key: call.values[key] for key in ("named", "held")}
            return {**reported(named), "predictions": call.spec.predictions}


def check_keys(predictions: Any, keys: str | Sequence[str] | None) -> list[str] | None:
    """Returns which predictions are wanted.

    Args:
        predictions: of the `EstimatorSpec`.
        keys: `predict_keys`.

    Returns:
        Their names; None for what is no dict.

    Raises:
        ValueError: names that are not there, or names where there is no dict.
    """
    if keys is None:
        return list(predictions) if isinstance(predictions, Mapping) else None
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, Mapping):
        raise ValueError(
            explain(
                f"predict_keys={wanted} name predictions, and model_fn gives one without a name.",
                expected="no predict_keys, or an EstimatorSpec whose predictions are a dict.",
                fix="leave predict_keys out.",
            )
        )
    unknown = [key for key in wanted if key not in predictions]
    if unknown or not wanted:
        raise ValueError(
            explain(
                f"predict_keys={wanted}, of which {unknown} are no predictions of model_fn.",
                expected=f"one or more of {sorted(predictions)}.",
                fix="correct the names, or leave predict_keys out for all.",
            )
        )
    return [key for key in predictions if key in wanted]


def batches_of(strategy: Any, predictions: Any, keys: list[str] | None) -> Iterator[Any]:
    """Yields the predictions of each replica of a step, true rows only, as NumPy arrays.

    Args:
        strategy: of the step.
        predictions: what the step returned.
        keys: those that are wanted; None where they are no dict.
    """
    wanted = predictions if keys is None else {key: predictions[key] for key in keys}
    leaves, structure = jax.tree.flatten(wanted, is_leaf=lambda leaf: hasattr(leaf, "components"))
    for parts in zip(*map(strategy.local_results, leaves), strict=True):
        batch = [np.asarray(part) for part in parts]
        if any(part.ndim == 0 or len(part) for part in batch):  # else this replica had no examples
            yield jax.tree.unflatten(structure, batch)


def examples_of(batch: Any) -> Iterator[Any]:
    """Yields the rows of a batch.

    Args:
        batch: pytree of arrays with the examples on axis 0.

    Raises:
        ValueError: arrays of different lengths, or of none.
    """
    leaves = jax.tree.leaves(batch)
    lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            explain(
                f"Predictions of a batch have the shapes {[leaf.shape for leaf in leaves]}.",
                expected="a row for each example in each of them.",
                fix="pass yield_single_examples=False to get whole batches.",
            )
        )
    for row in range(len(leaves[0])):
        yield jax.tree.map(lambda leaf, row=row: leaf[row], batch)

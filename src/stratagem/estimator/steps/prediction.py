"""Prediction step: predictions as rows in input order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.steps.model_step import ModelStep, reported
from stratagem.keras.numerics.step_mode import StepMode, step_mode
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


class PredictionStep(ModelStep):
    """Computes `spec.predictions` on each replica."""

    mode = ModeKeys.PREDICT

    def step(self, features: object, labels: object) -> Any:
        """Returns this replica's predictions and values for hooks."""
        with step_mode(StepMode.MEAN):
            call = self.call(features, None)
            named = {key: call.values[key] for key in ("named", "held")}
            return {**reported(named), "predictions": call.spec.predictions}


def select_keys(predictions: object, keys: str | Sequence[str] | None) -> list[str] | None:
    """Returns the names of the predictions to return; None if they are not a dict."""
    if keys is None:
        return list(predictions) if isinstance(predictions, Mapping) else None
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, Mapping):
        raise ValueError(
            explain(
                f"predict_keys={wanted} cannot select from predictions without names.",
                expected="an EstimatorSpec whose predictions are a dict, or no predict_keys.",
                fix="omit predict_keys.",
            )
        )
    unknown = [key for key in wanted if key not in predictions]
    if unknown or not wanted:
        raise ValueError(
            explain(
                f"predict_keys={wanted} is empty or contains unknown names: {unknown}.",
                expected=f"one or more of {sorted(predictions)}.",
                fix="correct the names, or omit predict_keys for all predictions.",
            )
        )
    return [key for key in predictions if key in wanted]


def prediction_batches(
    strategy: Strategy, predictions: Any, keys: list[str] | None
) -> Iterator[Any]:
    """Yields each replica's predictions as NumPy arrays, without padding rows."""
    wanted = predictions if keys is None else {key: predictions[key] for key in keys}
    leaves, structure = jax.tree.flatten(wanted, is_leaf=lambda leaf: hasattr(leaf, "components"))
    for parts in zip(*map(strategy.local_results, leaves), strict=True):
        batch = [np.asarray(part) for part in parts]
        if any(part.ndim == 0 or len(part) for part in batch):  # skips replicas without examples
            yield jax.tree.unflatten(structure, batch)


def split_examples(batch: object) -> Iterator[Any]:
    """Yields the rows of a batch."""
    leaves = jax.tree.leaves(batch)
    lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            explain(
                f"Predictions of a batch have the shapes {[leaf.shape for leaf in leaves]}.",
                expected="the same number of rows in each, one per example.",
                fix="pass yield_single_examples=False to get whole batches.",
            )
        )
    for row in range(len(leaves[0])):
        yield jax.tree.map(lambda leaf, row=row: leaf[row], batch)

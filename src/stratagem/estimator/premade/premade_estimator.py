"""What every pre-made estimator is: an Estimator with feature columns, a network and a head."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.estimator.estimator import Estimator
from stratagem.estimator.feature_column.columns import FeatureColumn, check_columns, encode_groups
from stratagem.estimator.heads.head import Head
from stratagem.estimator.loops.host_parts import HostParts
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.messages import explain

__all__ = ["EXAMPLES", "PremadeEstimator", "columns_of"]

EXAMPLES = "examples"


class PremadeEstimator(Estimator):
    """An Estimator whose batches are encoded by feature columns before they reach a device.

    Args:
        model_fn: the model function; its features are encoded, its labels are numbers.
        head: of the model.
        column_groups: the columns, one group a network. Without groups the model function gets a
            number for each example under `EXAMPLES`.
        model_dir: as of `Estimator`.
        config: as of `Estimator`.
        warm_start_from: as of `Estimator`.
    """

    def __init__(
        self,
        model_fn: Any,
        head: Head,
        column_groups: Sequence[tuple[FeatureColumn, ...]],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: Any,
    ) -> None:
        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        weights = () if head.weight_column is None else ((head.weight_column,),)

        def encode(batch: Any, mode: str) -> Any:
            has_labels = isinstance(batch, tuple | list)
            features, labels = batch if has_labels else (batch, None)
            if mode == ModeKeys.PREDICT:
                return encoded(features, column_groups)
            _check_labels(labels)
            return encoded(features, [*column_groups, *weights]), head.encode_labels(labels)

        def encoded(features: Any, groups: Sequence[tuple[FeatureColumn, ...]]) -> dict[str, Any]:
            values = encode_groups(features, groups)
            return values if column_groups else {**values, EXAMPLES: _numbered(features)}

        self._host_parts = HostParts(encode=encode, decode=head.decode)


def _numbered(features: Mapping[str, Any]) -> np.ndarray:
    """A number for each example of a batch."""
    return np.arange(len(next(iter(features.values()))), dtype="float32")


def columns_of(feature_columns: Iterable[FeatureColumn] | None) -> tuple[FeatureColumn, ...]:
    """Returns the columns of a network; none for None.

    Raises:
        ValueError: something that is no column, or two that share a name.
    """
    columns = None if feature_columns is None else tuple(feature_columns)
    return () if columns is None else tuple(check_columns(columns))


def _check_labels(labels: Any) -> None:
    if labels is None or isinstance(labels, Mapping):
        raise ValueError(
            explain(
                f"input_fn gives labels of type {type(labels).__name__}.",
                expected="an array of labels beside the features.",
                fix="let it return (features, labels).",
            )
        )

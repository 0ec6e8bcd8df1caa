"""PremadeEstimator: base of Estimators with feature columns, a network and a head."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.estimator.estimator import Estimator
from stratagem.estimator.feature_column.columns import FeatureColumn, check_columns, encode_groups
from stratagem.estimator.heads.head import Head
from stratagem.estimator.loops.host_transforms import HostTransforms
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.premade.networks import EXAMPLES, Network
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.train_op import Minimize, minimize
from stratagem.messages import explain


class PremadeEstimator(Estimator):
    """Estimator whose batches are encoded by feature columns on the host.

    The networks' logits are added. Each network comes with a function that creates its optimizer.
    Without columns, the networks get only one number per example, named `EXAMPLES`.
    """

    def __init__(
        self,
        head: Head,
        networks: Sequence[tuple[Network, Callable[[], Any]]],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: object,
    ) -> None:
        def model_fn(features: Mapping[str, Any], labels: object, mode: str) -> EstimatorSpec:
            training = mode == ModeKeys.TRAIN
            units = head.logits_dimension
            outputs = [
                network.logits(features, units, training=training) for network, _ in networks
            ]

            def train_op(loss: object) -> list[Minimize]:
                return [
                    minimize(new_optimizer(), loss, variables)
                    for (_, new_optimizer), (_, variables) in zip(networks, outputs, strict=True)
                ]

            logits = functools.reduce(operator.add, [logits for logits, _ in outputs])
            return head.create_estimator_spec(
                features, mode, logits, labels, train_op_fn=train_op if training else None
            )

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        columns = [network.feature_columns for network, _ in networks]
        column_groups = [group for group in columns if group]
        weights = () if head.weight_column is None else ((head.weight_column,),)

        def encode(batch: object, mode: str) -> Any:
            has_labels = isinstance(batch, tuple | list)
            features, labels = batch if has_labels else (batch, None)
            if mode == ModeKeys.PREDICT:
                return encoded(features, column_groups)
            _check_labels(labels)
            return encoded(features, [*column_groups, *weights]), head.encode_labels(labels)

        def encoded(features: Any, groups: Sequence[tuple[FeatureColumn, ...]]) -> dict[str, Any]:
            values = encode_groups(features, groups)
            return values if column_groups else {**values, EXAMPLES: _numbered(features)}

        self._host_transforms = HostTransforms(encode=encode, decode=head.decode)


def _numbered(features: Mapping[str, Any]) -> np.ndarray:
    """Returns one number per example of a batch."""
    return np.arange(len(next(iter(features.values()))), dtype="float32")


def checked_columns(feature_columns: Iterable[FeatureColumn] | None) -> tuple[FeatureColumn, ...]:
    """Returns the columns of a network; none for None."""
    columns = None if feature_columns is None else tuple(feature_columns)
    return () if columns is None else tuple(check_columns(columns))


def _check_labels(labels: object) -> None:
    if labels is None or isinstance(labels, Mapping):
        raise ValueError(
            explain(
                f"input_fn returned labels of type {type(labels).__name__}.",
                expected="an array of labels in addition to the features.",
                fix="return (features, labels) from input_fn.",
            )
        )

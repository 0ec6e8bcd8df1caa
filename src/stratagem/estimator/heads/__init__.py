"""Heads: what a model function makes of logits."""

from stratagem.estimator.heads.binary_class import BinaryClassHead
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.linked_regression import (
    LogisticRegressionHead,
    PoissonRegressionHead,
)
from stratagem.estimator.heads.multi_class import MultiClassHead, binary_or_multi_class_head
from stratagem.estimator.heads.regression import RegressionHead

__all__ = [
    "BinaryClassHead",
    "Head",
    "LogisticRegressionHead",
    "MultiClassHead",
    "PoissonRegressionHead",
    "RegressionHead",
    "binary_or_multi_class_head",
]

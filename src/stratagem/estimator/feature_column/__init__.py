"""Feature columns: conversion of raw features to model inputs."""

from stratagem.estimator.feature_column.categorical import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
    crossed_column,
)
from stratagem.estimator.feature_column.columns import (
    bucketized_column,
    encode_features,
    numeric_column,
    weighted_categorical_column,
)
from stratagem.estimator.feature_column.layers import (
    DenseFeatures,
    LinearModel,
    embedding_column,
    indicator_column,
    shared_embeddings,
)

__all__ = [
    "DenseFeatures",
    "LinearModel",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "encode_features",
    "indicator_column",
    "numeric_column",
    "shared_embeddings",
    "weighted_categorical_column",
]

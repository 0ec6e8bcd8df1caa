"""Recommenders with KerasRS: embeddings, ranking losses and metrics, retrieval."""

from __future__ import annotations

import functools
from typing import Any

import keras
import keras_rs
import numpy as np

from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    evaluated,
    fitted,
    measured,
    predicted,
)

_BATCH_SIZE = 4
_NUM_ROWS = 11
_LIST_SIZE = 5


def _table(name: str, vocabulary_size: int, combiner: str) -> Any:
    """A table with a seed: KerasRS draws that of its defaults when it is imported."""
    return keras_rs.layers.TableConfig(
        name=name,
        vocabulary_size=vocabulary_size,
        embedding_dim=6,
        combiner=combiner,
        initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=vocabulary_size),
    )


def distributed_embedding(place: Place) -> Measurements:
    """Two tables, one of them shared by two features of which one has several ids a row."""
    films, users = _table("films", 23, "mean"), _table("users", 7, "sum")
    feature = functools.partial(keras_rs.layers.FeatureConfig, output_shape=(None, 6))
    features = {
        "film": feature(name="film", table=films, input_shape=(None, 1)),
        "seen": feature(name="seen", table=films, input_shape=(None, 3)),
        "user": feature(name="user", table=users, input_shape=(None, 1)),
    }
    random = np.random.default_rng(3)
    rows = {
        "film": random.integers(0, 23, (_NUM_ROWS, 1)).astype("int32"),
        "seen": random.integers(0, 23, (_NUM_ROWS, 3)).astype("int32"),
        "user": random.integers(0, 7, (_NUM_ROWS, 1)).astype("int32"),
    }
    ratings = random.uniform(1, 5, (_NUM_ROWS, 1)).astype("float32")
    with place.scope():
        inputs = {
            name: keras.Input(ids.shape[1:], dtype="int32", name=name) for name, ids in rows.items()
        }
        embedded = keras_rs.layers.DistributedEmbedding(features)(inputs)
        crossed = keras_rs.layers.FeatureCross(kernel_initializer="glorot_uniform")(
            keras.layers.Concatenate()(list(embedded.values()))
        )
        dotted = keras_rs.layers.DotInteraction()(list(embedded.values()))
        outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([crossed, dotted]))
        model = keras.Model(inputs, outputs)
        model.compile(optimizer=keras.optimizers.Adagrad(0.1), loss="mse", metrics=["mae"])
    return measured(place, model, rows, ratings, _BATCH_SIZE)


def _lists() -> tuple[np.ndarray, np.ndarray]:
    """Features of items in lists, and their relevance; -1 is no item."""
    random = np.random.default_rng(4)
    x = random.standard_normal((_NUM_ROWS, _LIST_SIZE, 3)).astype("float32")
    relevance = random.integers(0, 4, (_NUM_ROWS, _LIST_SIZE)).astype("float32")
    lengths = random.integers(2, _LIST_SIZE + 1, _NUM_ROWS)
    return x, np.where(np.arange(_LIST_SIZE) < lengths[:, None], relevance, -1.0).astype("float32")


def _scorer() -> Any:
    return keras.Sequential(
        [
            keras.Input((_LIST_SIZE, 3)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.Dense(1),
            keras.layers.Reshape((_LIST_SIZE,)),
        ]
    )


def _ranking(place: Place, loss: Any, metrics: list[Any]) -> Measurements:
    """Ties are not broken at random, because replicas draw numbers of their own."""
    x, relevance = _lists()
    with place.scope():
        model = _scorer()
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
            loss=loss(),
            metrics=[metric(shuffle_ties=False) for metric in metrics],
        )
    return measured(place, model, x, relevance, _BATCH_SIZE)


def pairwise_hinge_loss(place: Place) -> Measurements:
    metrics = keras_rs.metrics
    by_rank = [functools.partial(kind, k=2) for kind in (metrics.PrecisionAtK, metrics.RecallAtK)]
    return _ranking(place, keras_rs.losses.PairwiseHingeLoss, [metrics.NDCG, metrics.DCG, *by_rank])


def list_mle_loss(place: Place) -> Measurements:
    metrics = keras_rs.metrics
    return _ranking(
        place,
        keras_rs.losses.ListMLELoss,
        [metrics.MeanReciprocalRank, metrics.MeanAveragePrecision],
    )


class _MaskedRanker(keras.Model):
    """Gives the loss labels and a mask, which are not of the structure of the outputs."""

    def __init__(self, scorer: Any) -> None:
        super().__init__()
        self.scorer = scorer
        self.ranking_loss = keras_rs.losses.PairwiseLogisticLoss()

    def call(self, inputs: Any) -> Any:
        return self.scorer(inputs["x"])

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, **_: Any) -> Any:
        target = {"labels": y, "mask": x["mask"]}
        return self.ranking_loss(y_true=target, y_pred=y_pred, sample_weight=sample_weight)


def masked_ranking(place: Place) -> Measurements:
    """A mask as an input, a loss in `compute_loss`, and weights of whole lists."""
    x, relevance = _lists()
    weights = np.random.default_rng(5).uniform(0.2, 2.0, (_NUM_ROWS, 1)).astype("float32")
    inputs = {"x": x, "mask": relevance >= 0}
    with place.scope():
        model = _MaskedRanker(_scorer())
        model.compile(optimizer=keras.optimizers.SGD(0.05))
    relevance = np.maximum(relevance, 0.0)
    arguments = {"batch_size": _BATCH_SIZE, "sample_weight": weights}
    return {
        **fitted(place, model, inputs, relevance, **arguments),
        **evaluated(model, inputs, relevance, **arguments),
        **predicted(model, inputs, batch_size=_BATCH_SIZE),
    }


class _TwoTowers(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.users = keras.layers.Embedding(7, 4)
        self.films = keras.layers.Embedding(23, 4)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)

    def build(self, input_shape: Any) -> None:
        self.users.build(input_shape)
        self.films.build(input_shape)
        self.retrieval.candidate_embeddings = self.films.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        embedded = self.users(inputs["user"])
        result = {"embedded": embedded}
        if not training:
            result["films"] = self.retrieval(embedded)
        return result

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, **_: Any) -> Any:
        scores = keras.ops.matmul(y_pred["embedded"], keras.ops.transpose(self.films.embeddings))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss(y, scores, sample_weight)


def retrieval(place: Place) -> Measurements:
    """Two towers with all films as candidates; predict gives the best three ids a user."""
    random = np.random.default_rng(6)
    rows = {"user": random.integers(0, 7, _NUM_ROWS).astype("int32")}
    films = random.integers(0, 23, _NUM_ROWS).astype("int32")
    with place.scope():
        model = _TwoTowers()
        model.compile(optimizer=keras.optimizers.Adagrad(0.5))
    return measured(place, model, rows, films, _BATCH_SIZE)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        distributed_embedding,
        pairwise_hinge_loss,
        list_mle_loss,
        masked_ranking,
        retrieval,
    )
}

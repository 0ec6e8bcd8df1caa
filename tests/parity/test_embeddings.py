"""Embeddings, whose replicas exchange rows: the same training as with plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.batches import take_batch
from stratagem.input.placement import place
from stratagem.keras.training.replica_steps import ReplicaSteps
from tests.parity.comparison import (
    NUM_EXAMPLES,
    Scope,
    assert_like_plain_keras,
    fitted,
    mirrored,
    with_known_weights,
)

NUM_WORDS, WIDTH, LENGTH = 9_000, 8, 4  # large enough for rows to pay


def _data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    words = generator.integers(0, NUM_WORDS, (NUM_EXAMPLES, LENGTH))
    words[::2, 1] = 5  # a word that all replicas have, some of them twice
    words[3, :] = 5
    return words, generator.normal(size=(NUM_EXAMPLES, 1)).astype("float32")


def _plain() -> Any:
    return keras.layers.Embedding(NUM_WORDS, WIDTH)


def _regularised() -> Any:
    return keras.layers.Embedding(NUM_WORDS, WIDTH, embeddings_regularizer="l2")


def _masked() -> Any:
    return keras.layers.Embedding(NUM_WORDS, WIDTH, mask_zero=True)


class _Tied(keras.layers.Layer):
    """Looks words up and scores all words by the same table."""

    def build(self, input_shape: Any) -> None:
        self.table = keras.layers.Embedding(NUM_WORDS, WIDTH)
        self.table.build()

    def call(self, inputs: Any) -> Any:
        scores = keras.ops.matmul(self.table(inputs), keras.ops.transpose(self.table.embeddings))
        return keras.ops.stack([keras.ops.mean(scores, -1), keras.ops.max(scores, -1)], -1)


class _Low(keras.layers.Embedding):
    """An embedding whose table is frozen, plus a product of two small ones."""

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        self.enable_lora(2, a_initializer="ones", b_initializer="ones")


@pytest.mark.parametrize(
    ("layer", "optimizer"),
    [
        pytest.param(_plain, "sgd", id="plain_sgd"),
        pytest.param(_plain, "adam", id="plain"),
        pytest.param(_regularised, "adam", id="regularised"),
        pytest.param(_masked, "adam", id="masked"),
        pytest.param(_Tied, "adam", id="tied"),
        pytest.param(lambda: _Low(NUM_WORDS, WIDTH), "adam", id="low_rank"),
    ],
)
def test_training_with_embeddings(layer: Callable[[], Any], optimizer: str) -> None:
    words, y = _data()

    def job(scope: Scope) -> dict[str, Any]:
        with scope():
            model = keras.Sequential(
                [
                    keras.Input((LENGTH,), dtype="int32"),
                    layer(),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(1),
                ]
            )
            with_known_weights(model)
            clipped = {"global_clipnorm": 0.1} if layer is _plain else {}
            made = keras.optimizers.get(
                {"class_name": optimizer, "config": {"learning_rate": 0.01} | clipped}
            )
            model.compile(made, loss="mse")
        return fitted(model, words, y)

    assert_like_plain_keras(job)


def test_replicas_exchange_rows_in_fit() -> None:
    words, y = _data()
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                _plain(),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", loss="mse")
    batch = take_batch((words, y), 2)
    model.train_on_batch(words, y)  # builds the optimizer and the metrics
    arguments = batch_arguments(place([batch], strategy.topology))
    lowered = strategy.executor.lower(ReplicaSteps(model).train, arguments, strategy.topology)
    text = lowered.compile().as_text()
    assert f"f32[{NUM_WORDS},{WIDTH}]" in text
    for line in text.splitlines():
        assert not ("all-reduce(" in line and f"f32[{NUM_WORDS},{WIDTH}]" in line), line
    assert "all-gather(" in text

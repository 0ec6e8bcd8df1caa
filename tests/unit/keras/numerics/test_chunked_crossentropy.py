"""The loss that computes the head of a language model, in `fit` and in custom loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

_CLASSES = 11
_RANDOM = np.random.default_rng(0)
_TOKENS = _RANDOM.integers(0, _CLASSES, (7, 6)).astype("int32")
_LABELS = _RANDOM.integers(0, _CLASSES, (7, 6)).astype("int32")
_WEIGHTS = _RANDOM.integers(0, 2, (7, 6)).astype("float32")

_Loss = sg.nn.ChunkedSparseCategoricalCrossentropy


class _LanguageModel(keras.Model):
    """Returns hidden states, or with `whole` logits; its head is one of its layers."""

    def __init__(self, *, is_tied: bool, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.is_tied = is_tied
        arguments: dict[str, Any] = {"tie_weights": is_tied, "logit_soft_cap": 3.0}
        self.embedding = keras.layers.ReversibleEmbedding(_CLASSES, 4, **arguments)
        self.inner = keras.layers.Dense(4)
        self.head = self.embedding if is_tied else keras.layers.Dense(_CLASSES)
        self.head.build((None, 4) if not is_tied else None)

    def call(self, tokens: Any) -> Any:
        hidden = self.inner(self.embedding(tokens))
        if not self.whole:
            return hidden
        return self.embedding(hidden, reverse=True) if self.is_tied else self.head(hidden)


def _fitted(scope: Any, *, is_tied: bool, whole: bool, ignore_class: int | None) -> Any:
    keras.utils.set_random_seed(0)
    with scope:
        model: Any = _LanguageModel(is_tied=is_tied, whole=whole)
        loss: Any = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignore_class
        )
        if not whole:
            loss = _Loss(model.head, chunk_size=4, ignore_class=ignore_class)
        model.compile(keras.optimizers.SGD(0.5), loss)
    history = model.fit(
        _TOKENS, _LABELS, sample_weight=_WEIGHTS, batch_size=4, shuffle=False, verbose=0
    )
    return history.history["loss"], [np.asarray(one.value) for one in model.weights]


_SCOPES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "one": lambda: sg.OneDeviceStrategy("cpu:0").scope(),
    "two": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
    "sharded": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all").scope(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_tied", "ignore_class"),
    [("plain", True, None), ("one", False, 3), ("two", True, 3), ("sharded", False, None)],
)
def test_fit_equals_that_of_whole_logits(
    name: str, is_tied: bool, ignore_class: int | None
) -> None:
    if not hasattr(keras.layers, "ReversibleEmbedding"):
        pytest.skip("this Keras has no ReversibleEmbedding")
    arguments: dict[str, Any] = {"is_tied": is_tied, "ignore_class": ignore_class}
    losses, weights = _fitted(_SCOPES[name](), whole=False, **arguments)
    expected_losses, expected = _fitted(contextlib.nullcontext(), whole=True, **arguments)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_custom_loop_gets_losses_of_positions() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        head = keras.layers.Dense(_CLASSES)
        head.build((None, 4))
    hidden = _RANDOM.normal(size=(6, 4)).astype("float32")
    loss = _Loss(head, chunk_size=5, reduction=None)

    def step() -> Any:
        total = lambda: sg.compute_average_loss(loss(_LABELS[0], hidden), global_batch_size=12)  # noqa: E731
        return sg.value_and_grad(total, [head.kernel])

    value, (gradient,) = strategy.run(step)
    whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected, (of_kernel,) = sg.value_and_grad(
        lambda: whole(_LABELS[0], head(hidden)), [head.kernel]
    )
    np.testing.assert_allclose(strategy.reduce("SUM", value, axis=None), expected, rtol=1e-5)
    total = strategy.reduce("SUM", gradient, axis=None)
    np.testing.assert_allclose(total, of_kernel, rtol=1e-4, atol=1e-6)


def test_loaded_loss_asks_for_a_head() -> None:
    head = keras.layers.Dense(_CLASSES)
    config = keras.saving.serialize_keras_object(_Loss(head, chunk_size=5, ignore_class=-1))
    loaded: Any = keras.saving.deserialize_keras_object(config)
    assert (loaded.chunk_size, loaded.ignore_class) == (5, -1)
    with pytest.raises(ValueError, match="was loaded from a file and has no head"):
        loaded(_LABELS, np.ones((7, 6, 4), "float32"))


def test_other_heads_are_refused() -> None:
    with pytest.raises(TypeError, match="received head=<Embedding"):
        _Loss(keras.layers.Embedding(3, 4))
    head = keras.layers.Dense(_CLASSES, activation="softmax")
    head.build((None, 4))
    with pytest.raises(ValueError, match="is quantized or has an activation"):
        _Loss(head)(_LABELS, np.ones((7, 6, 4), "float32"))

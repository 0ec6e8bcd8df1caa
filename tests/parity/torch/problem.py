"""The problem that PyTorch and we train on: the same examples, weights and settings."""

from __future__ import annotations

import numpy as np

__all__ = [
    "BATCH_SIZE",
    "HIDDEN",
    "LEARNING_RATE",
    "MOMENTUM",
    "NUM_CLASSES",
    "NUM_FEATURES",
    "NUM_REPLICAS",
    "NUM_STEPS",
    "OVERLAP",
    "OWN_SHARE",
    "PERIOD",
    "RANK",
    "STREAMED_STEPS",
    "WHOLE_STEPS",
    "examples",
    "initial_weights",
]

NUM_REPLICAS, NUM_STEPS, BATCH_SIZE = 2, 30, 32
NUM_FEATURES, HIDDEN, NUM_CLASSES = 64, 48, 10
LEARNING_RATE, MOMENTUM = 0.1, 0.9
PERIOD, RANK = 6, 2
# Streaming: the steps that a fragment is under way, and the share of own weights that is kept.
OVERLAP, OWN_SHARE = 2, 0.25
# After so many, no fragment is under way.
STREAMED_STEPS = NUM_STEPS - 1
# PyTorch's hook sums the gradients of the first steps whole.
WHOLE_STEPS = 2


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and classes of each step, which a hidden model has drawn."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(NUM_STEPS, BATCH_SIZE, NUM_FEATURES)).astype("float32")
    scores = np.tanh(x @ rng.normal(size=(NUM_FEATURES, 16))) @ rng.normal(size=(16, NUM_CLASSES))
    return x, scores.argmax(axis=-1).astype("int32")


def initial_weights() -> list[np.ndarray]:
    """Returns kernels of shape (inputs, outputs), each with its bias."""
    rng = np.random.default_rng(4)
    return [
        rng.normal(size=(NUM_FEATURES, HIDDEN), scale=0.15).astype("float32"),
        np.zeros(HIDDEN, "float32"),
        rng.normal(size=(HIDDEN, NUM_CLASSES), scale=0.15).astype("float32"),
        np.zeros(NUM_CLASSES, "float32"),
    ]

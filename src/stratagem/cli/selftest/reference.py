"""Linear regression by gradient descent in NumPy: the numbers that every strategy must reach."""

from __future__ import annotations

import numpy as np

# Neither the rows nor the batches divide evenly: 11 rows are batches of 4, 4 and 3.
_NUM_ROWS, _NUM_FEATURES = 11, 3
BATCH_SIZE, EPOCHS, LEARNING_RATE = 4, 3, 0.1


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns features, shape (11, 3), and labels, shape (11, 1), float32."""
    random = np.random.default_rng(0)
    features = random.normal(size=(_NUM_ROWS, _NUM_FEATURES)).astype("float32")
    return features, (features @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25)


def trained_weights() -> np.ndarray:
    """Returns kernel and bias after training from zero, one vector, float64."""
    features, labels = (array.astype("float64") for array in data())
    inputs = np.concatenate([features, np.ones((_NUM_ROWS, 1))], axis=1)
    weights = np.zeros((_NUM_FEATURES + 1, 1))
    for _ in range(EPOCHS):
        for first in range(0, _NUM_ROWS, BATCH_SIZE):
            rows = inputs[first : first + BATCH_SIZE]
            errors = rows @ weights - labels[first : first + BATCH_SIZE]
            weights -= LEARNING_RATE * 2 * rows.T @ errors / len(rows)
    return weights[:, 0]

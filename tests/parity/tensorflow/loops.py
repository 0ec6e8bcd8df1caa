"""Training loops of a user's own that TensorFlow and Stratagem both carry out, without either.

66 examples in batches of 32 leave 2 for the last step of an epoch. As in TensorFlow's guide, every
step divides its loss by the size of a whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.parity.tensorflow.cases import CASES, Arrays, Case

__all__ = ["BATCH_SIZE", "LOOPS", "NUM_EPOCHS", "examples", "measured"]

BATCH_SIZE = 32
NUM_EPOCHS = 2
_NUM_EXAMPLES = 66

# One case for each optimizer; what the loops take of it is the model and the optimizer.
LOOPS: tuple[Case, ...] = tuple(
    case for case in CASES if case.name in ("dense_sgd_full", "dense_adam_even")
)


def examples(case: Case) -> Arrays:
    """Returns the examples of a loop."""
    return case.draw(np.random.RandomState(5), _NUM_EXAMPLES)


def measured(losses: list[Any], model: Any) -> dict[str, np.ndarray]:
    """Returns what a loop is compared by: the loss of each step and the last weights."""
    weights = {f"weights/{i}": np.asarray(w) for i, w in enumerate(model.get_weights())}
    return {"losses": np.array([float(loss) for loss in losses]), **weights}

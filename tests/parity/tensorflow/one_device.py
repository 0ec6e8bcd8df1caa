"""What two replicas do, said on one device: the third opinion where TensorFlow's is wrong.

Nothing here knows of a strategy. A batch of B examples over two replicas is its first `ceil(B / 2)`
rows and its last `floor(B / 2)`.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.parity.tensorflow.cases import NUM_REPLICAS, Case


def tensorflow_weights(case: Case) -> np.ndarray:
    """Returns the sample weights with which the right gradients become TensorFlow's.

    TensorFlow averages over each replica's examples, and then over the replicas. So a replica's
    examples weigh `1 / (replicas * examples of the replica)` each, where `1 / examples of the
    batch` would be right: in a last batch of five, 1/6 for three of them and 1/4 for two. A last
    batch of one leaves the second replica empty, and the example weighs 1/2.

    Args:
        case: which run.

    Returns:
        float32, shape (examples,); the case's own weights times TensorFlow's share over the right
        one.
    """
    given = case.sample_weight()
    weights = np.ones(case.num_examples, "float32") if given is None else given
    short = case.num_in_short_batch
    if short:
        in_first = -(-short // NUM_REPLICAS)
        sizes = np.where(np.arange(short) < in_first, in_first, short - in_first)
        weights[-short:] *= (short / (NUM_REPLICAS * sizes)).astype("float32")
    return weights


def with_batch_norm_of_two_replicas(keras: ModuleType) -> Any:
    """Returns a stand-in for the `keras` module whose batch norm treats each half batch alone.

    Args:
        keras: the module, on the JAX backend.

    Returns:
        An object for a case's `build`. Each half is normalised with its own statistics; the moving
        ones are the mean of what the halves arrive at.
    """

    class BatchNormalization(keras.layers.BatchNormalization):
        def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
            if not training:
                return super().call(inputs, training=training, mask=mask)
            moving = (self.moving_mean, self.moving_variance)
            before = [variable.value for variable in moving]
            outputs, after = [], []
            middle = -(-inputs.shape[0] // NUM_REPLICAS)
            for half in (inputs[:middle], inputs[middle:]):
                for variable, value in zip(moving, before, strict=True):
                    variable.assign(value)
                outputs.append(super().call(half, training=training))
                after.append([variable.value for variable in moving])
            for variable, values in zip(moving, zip(*after, strict=True), strict=True):
                variable.assign(sum(values) / NUM_REPLICAS)
            return keras.ops.concatenate(outputs, axis=0)

    layers = {name: getattr(keras.layers, name) for name in dir(keras.layers)}
    layers["BatchNormalization"] = BatchNormalization
    names = {name: getattr(keras, name) for name in dir(keras)}
    return SimpleNamespace(**{**names, "layers": SimpleNamespace(**layers)})

"""Carries out the loops under TensorFlow's MirroredStrategy with two replicas; writes `loops.npz`.

Run it from the repository's root, with `.venv-peers`, which `make .venv-peers/.complete` makes:

    KERAS_BACKEND=tensorflow python -m tests.parity.tensorflow.loop_reference
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parity.tensorflow.cases import NUM_REPLICAS, Case, initial_weights
from tests.parity.tensorflow.loops import BATCH_SIZE, LOOPS, NUM_EPOCHS, examples, measured

_FILE = Path(__file__).parent / "loops.npz"


def _carry_out(case: Case, strategy: Any) -> dict[str, np.ndarray]:
    with strategy.scope():
        model = case.build(keras)
        model.set_weights(initial_weights(model))
        optimizer = case.optimizer(keras)
        optimizer.build(model.trainable_variables)
    data = examples(case)
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((data.x, data.y)).batch(BATCH_SIZE)
    )
    per_example = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = per_example(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    losses = [step(batch) for _ in range(NUM_EPOCHS) for batch in dataset]
    return measured(losses, model)


def main() -> None:
    """Carries out all loops and writes the file."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS
    )
    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)])
    arrays: dict[str, np.ndarray] = {}
    for case in LOOPS:
        result = _carry_out(case, strategy)
        arrays |= {f"{case.name}/{key}": value for key, value in result.items()}
        print(f"{case.name}: losses {result['losses']}")
    np.savez_compressed(_FILE, versions=np.array([tf.__version__, keras.__version__]), **arrays)


if __name__ == "__main__":
    main()

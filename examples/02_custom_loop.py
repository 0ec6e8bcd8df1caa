# Expected last line: Test accuracy: 0.9556
"""A training loop of one's own: a step for one replica, run on two.

`train_step` is written as for one device. It sees this replica's part of a batch; because its loss
is divided by the global batch size, the gradients that the optimizer sums over the replicas are
those of the whole batch.
"""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

GLOBAL_BATCH_SIZE = 64
NUM_EPOCHS = 15


def main():
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.data.astype("float32") / 16, digits.target, test_size=0.2, random_state=0
    )
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(64, activation="gelu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(5e-3)
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(images, labels):
        def loss_fn():
            losses = per_example_loss(labels, model(images, training=True))
            return sg.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def count_right(images, labels):
        return (model(images).argmax(axis=1) == labels).sum()

    order = np.random.default_rng(0)
    for epoch in range(1, NUM_EPOCHS + 1):
        losses = []
        for batch in batches(order.permutation(len(images))):
            inputs = split(strategy, images[batch], labels[batch])
            per_replica = strategy.run(train_step, args=inputs)
            losses.append(strategy.reduce("SUM", per_replica, axis=None))
        print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}")

    right = strategy.run(count_right, args=split(strategy, test_images, test_labels))
    print(f"Test accuracy: {strategy.reduce('SUM', right, axis=None) / len(test_images):.4f}")


def batches(indices):
    """Yields whole batches only: the rest of an epoch comes first in another one."""
    for start in range(0, len(indices) - GLOBAL_BATCH_SIZE + 1, GLOBAL_BATCH_SIZE):
        yield indices[start : start + GLOBAL_BATCH_SIZE]


def split(strategy, images, labels):
    """Gives each replica its part of a batch."""
    parts = strategy.num_replicas_in_sync

    def part_of(context):
        part = context.replica_id_in_sync_group
        return np.split(images, parts)[part], np.split(labels, parts)[part]

    return strategy.distribute_values_from_function(part_of)


if __name__ == "__main__":
    main()

# Expected last line: Test accuracy: 0.9667
"""Loops of one's own that train, evaluate and predict: a step for one replica, run on two.

`replica_step` is written as for one device. It sees this replica's part of a batch; its loss is
divided by the examples of the whole batch, so that the gradients that the optimizer sums over the
replicas are those of one device, also of the last batch, which is short.
"""

from pathlib import Path

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

GLOBAL_BATCH_SIZE = 64
NUM_EPOCHS = 15
CHECKPOINTS = Path("runs", "custom_loop")


def main():
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images[..., None].astype("float32") / 16,
        digits.target,
        test_size=0.2,
        random_state=0,
    )
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(3e-3)
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(images, labels):
        def loss_fn():
            return sg.compute_average_loss(per_example_loss(labels, model(images, training=True)))

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @sg.function
    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    @sg.function
    def test_step(batch):
        strategy.run(
            lambda images, labels: test_accuracy.update_state(labels, model(images)), batch
        )

    training = strategy.distribute_dataset(
        sg.input.Dataset((images, labels), batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
    )
    test = strategy.distribute_dataset(
        sg.input.Dataset((test_images, test_labels), batch_size=GLOBAL_BATCH_SIZE)
    )
    CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    for epoch in range(1, NUM_EPOCHS + 1):
        losses = [train_step(batch) for batch in training]
        test_accuracy.reset_state()
        for batch in test:
            test_step(batch)
        model.save_weights(CHECKPOINTS / f"epoch_{epoch}.weights.h5")
        accuracy = float(test_accuracy.result())
        print(f"epoch {epoch}  loss {np.mean(losses):.4f}  test accuracy {accuracy:.4f}")

    logits = [strategy.gather(strategy.run(model, args=batch[:1]), axis=0) for batch in test]
    predicted = np.concatenate(logits).argmax(axis=1)
    assert len(predicted) == len(test_labels)  # no row of padding among them
    print(f"Test accuracy: {np.mean(predicted == test_labels):.4f}")


def build_model():
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


if __name__ == "__main__":
    main()

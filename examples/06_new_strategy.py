# Expected last line: Test accuracy, from cpu:2: 0.9611
"""A strategy of one's own: training on all devices but one, and evaluation on that one meanwhile.

A strategy chooses its devices and checks its arguments. How variables live, how a step becomes one
program and how batches are dealt out follows from the devices. Here the last one stays free: after
each epoch it evaluates the weights, while the others go on with the next epoch.
"""

from collections.abc import Sequence
from typing import Any, final

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import jax.numpy as jnp
import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from stratagem.devices.finding import find_devices, local_devices
from stratagem.devices.mesh import Topology

NUM_EPOCHS = 10


@final
class SpareDeviceStrategy(sg.Strategy):
    """Trains in lockstep on all devices but the last, which stays free for other work.

    Args:
        devices: names such as "gpu:0", indices or `jax.Device`s; None takes all local ones.

    Raises:
        ValueError: fewer than two devices.
    """

    def __init__(self, devices: Sequence[str | int | jax.Device] | None = None) -> None:
        found = local_devices() if devices is None else find_devices(list(devices))
        if len(found) < 2:
            raise ValueError(
                f"SpareDeviceStrategy was given {len(found)} device.\n"
                "Expected at least two: one to train on and one to spare.\n"
                "Fix: name more devices, or use sg.OneDeviceStrategy."
            )
        super().__init__(Topology(found[:-1]))
        self.spare_device = found[-1]


def main() -> None:
    digits: Any = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.data.astype("float32") / 16, digits.target, test_size=0.2, random_state=0
    )
    strategy = SpareDeviceStrategy(["cpu:0", "cpu:1", "cpu:2"])
    spare = sg.OneDeviceStrategy(strategy.spare_device)
    print(f"training under {strategy}, evaluation under {spare}")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = build_model(), keras.optimizers.Adam(3e-3)
    with spare.scope():
        copy = build_model()

    @sg.function
    def train_step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=(model, optimizer, *batch))
        return strategy.reduce("SUM", losses, axis=None)

    training = strategy.distribute_dataset(
        sg.input.Dataset((images, labels), batch_size=64, shuffle=True)
    )
    epochs: list[tuple[list[jax.Array], jax.Array]] = []
    for _ in range(NUM_EPOCHS):
        losses = [train_step(batch) for batch in training]
        copy.set_weights(model.get_weights())
        # This starts the evaluation and does not wait for it: the next epoch begins meanwhile.
        accuracy = spare.run(accuracy_of, args=(copy, test_images, test_labels))
        epochs.append((losses, accuracy))
    for epoch, (losses, accuracy) in enumerate(epochs, start=1):
        loss = sum(map(float, losses)) / len(losses)
        print(f"epoch {epoch:2}  loss {loss:.4f}  test accuracy {accuracy:.4f}")
    print(f"Test accuracy, from {strategy.spare_device}: {epochs[-1][1]:.4f}")


def replica_step(model: Any, optimizer: Any, images: jax.Array, labels: jax.Array) -> Any:
    def loss_fn() -> Any:
        logits = model(images, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return sg.compute_average_loss(losses)

    loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def accuracy_of(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(jnp.argmax(model(images), axis=1) == labels)


def build_model() -> keras.Sequential:
    return keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )


if __name__ == "__main__":
    main()

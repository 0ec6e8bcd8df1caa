# Expected last line: Eval accuracy: 0.9861, without the scope: 0.9861, within the scope: 0.9861
"""Ports "Distributed training with Keras", https://www.tensorflow.org/tutorials/distribute/keras

    python examples/guides/01_keras.py

Differences from TensorFlow's guide:

- scikit-learn's digits of 8 x 8 pixels replace MNIST, so batches and learning rates are fit to
  1,437 images.
- `sg.input.Dataset` replaces the tf.data pipeline; it draws a new order of all examples each epoch.
- `sg.TensorBoard` replaces Keras's callback, which needs TensorFlow.
"""

import pathlib

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Where there is no accelerator the CPU counts as two devices; ignored where there is one.
jax.config.update("jax_num_cpu_devices", 2)

FOLDER = pathlib.Path("runs", "guides", "keras")
EPOCHS = 12


def load_dataset():
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images[..., None], digits.target, test_size=0.2, random_state=0
    )
    return (images, labels), (test_images, test_labels)


print(sg.__version__)
keras.utils.set_random_seed(0)

# Download the dataset
mnist_train, mnist_test = load_dataset()

# Define the distribution strategy
strategy = sg.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Set up the input pipeline
BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    return image.astype(np.float32) / 16, label


train_dataset = sg.input.Dataset(scale(*mnist_train), batch_size=BATCH_SIZE, shuffle=True)
eval_dataset = sg.input.Dataset(scale(*mnist_test), batch_size=BATCH_SIZE)

# Create the model and instantiate the optimizer
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )

# Define the callbacks
checkpoint_dir = FOLDER / "training_checkpoints"
checkpoint_prefix = str(checkpoint_dir / "ckpt_{epoch:04d}.weights.h5")


def decay(epoch):
    if epoch < 3:
        return 1e-2
    if epoch < 7:
        return 1e-3
    return 1e-4


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = model.optimizer.learning_rate.numpy()
        print(f"Learning rate for epoch {epoch + 1} is {rate:.0e}")


callbacks = [
    sg.TensorBoard(log_dir=str(FOLDER / "logs")),
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]

# Train and evaluate
model.fit(train_dataset, epochs=EPOCHS, callbacks=callbacks, verbose=2)

latest_checkpoint = sorted(checkpoint_dir.glob("*"))[-1]
model.load_weights(latest_checkpoint)
eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
print(f"Eval loss: {eval_loss}, Eval accuracy: {eval_acc}")

# Save the model
path = FOLDER / "my_model.keras"
model.save(path)

# Load the model without Strategy.scope
unreplicated_model = keras.models.load_model(path)
unreplicated_model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(),
    metrics=["accuracy"],
)
_, unreplicated_acc = unreplicated_model.evaluate(eval_dataset, verbose=0)

# Load the model with Strategy.scope
with strategy.scope():
    replicated_model = keras.models.load_model(path)
    replicated_model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    _, replicated_acc = replicated_model.evaluate(eval_dataset, verbose=0)
print(
    f"Eval accuracy: {eval_acc:.4f}, without the scope: {unreplicated_acc:.4f}, "
    f"within the scope: {replicated_acc:.4f}"
)

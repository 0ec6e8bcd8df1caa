# Expected last line: Accuracy after restoring the saved model without strategy: 96.1
"""Ports "Custom training with tf.distribute.Strategy",
https://www.tensorflow.org/tutorials/distribute/custom_training

    python examples/guides/02_custom_training.py

Differences from TensorFlow's guide:

- scikit-learn's digits of 8 x 8 pixels replace Fashion MNIST; the model has one pooling less.
- `sg.value_and_grad` replaces GradientTape. It takes the variables before the model is called, so
  the model begins with an `Input`.
- `sg.input.Dataset` replaces the tf.data pipeline.
- `strategy.run_steps` replaces the loop over a dataset inside a `tf.function`.
"""

import os
import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Where there is no accelerator the CPU counts as two devices; ignored where there is one.
jax.config.update("jax_num_cpu_devices", 2)

EPOCHS = 10


def load_data():
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images, digits.target, test_size=0.2, random_state=0
    )
    return (images, labels), (test_images, test_labels)


print(sg.__version__)
keras.utils.set_random_seed(0)

# Download the Fashion MNIST dataset
(train_images, train_labels), (test_images, test_labels) = load_data()
train_images = train_images[..., None] / np.float32(16)
test_images = test_images[..., None] / np.float32(16)

# Create a strategy to distribute the variables and the graph
strategy = sg.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Set up the input pipeline
BATCH_SIZE_PER_REPLICA = 16
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

train_dataset = sg.input.Dataset(
    (train_images, train_labels), batch_size=GLOBAL_BATCH_SIZE, shuffle=True
)
test_dataset = sg.input.Dataset((test_images, test_labels), batch_size=GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


# Create the model
def create_model():
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


checkpoint_dir = tempfile.mkdtemp()  # a checkpoint is never written over another
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")

# Define the loss function
with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = sg.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += sg.nn.scale_regularization_loss(sum(model_losses))
        return loss


# Define the metrics to track loss and accuracy
with strategy.scope():
    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

# Training loop
with strategy.scope():
    model = create_model()
    optimizer = keras.optimizers.Adam(learning_rate=0.001)
    checkpoint = sg.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs

    def loss_fn():
        predictions = model(images, training=True)
        return compute_loss(labels, predictions, model.losses), predictions

    (loss, predictions), gradients = sg.value_and_grad(
        loss_fn, model.trainable_variables, has_aux=True
    )
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)
    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


@sg.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(sg.ReduceOp.SUM, per_replica_losses, axis=None)


@sg.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    train_loss = total_loss / num_batches

    for x in test_dist_dataset:
        distributed_test_step(x)

    if epoch % 2 == 0:
        checkpoint.save(checkpoint_prefix)

    template = "Epoch {}, Loss: {}, Accuracy: {}, Test Loss: {}, Test Accuracy: {}"
    print(
        template.format(
            epoch + 1,
            train_loss,
            train_accuracy.result() * 100,
            test_loss.result(),
            test_accuracy.result() * 100,
        )
    )
    test_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()

# Restore the latest checkpoint and test
eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
new_optimizer = keras.optimizers.Adam()
test_dataset = sg.input.Dataset((test_images, test_labels), batch_size=GLOBAL_BATCH_SIZE)


@sg.function
def eval_step(images, labels):
    predictions = new_model(images, training=False)
    eval_accuracy(labels, predictions)


checkpoint = sg.train.Checkpoint(optimizer=new_optimizer, model=new_model)
checkpoint.restore(sg.train.latest_checkpoint(checkpoint_dir))

for images, labels in test_dataset:
    eval_step(images, labels)
restored_accuracy = eval_accuracy.result() * 100

# Alternate ways of iterating over a dataset: using iterators
for _ in range(2):
    total_loss = 0.0
    num_batches = 0
    train_iter = iter(train_dist_dataset)
    for _ in range(10):
        total_loss += distributed_train_step(next(train_iter))
        num_batches += 1
    average_train_loss = total_loss / num_batches
    print(f"Loss: {average_train_loss}, Accuracy: {train_accuracy.result() * 100}")
    train_accuracy.reset_state()

# Alternate ways of iterating over a dataset: many steps in one call
num_batches = len(train_dist_dataset)


def distributed_train_epoch(iterator):
    losses = strategy.run_steps(train_step, iterator, num_batches, reduce=sg.ReduceOp.SUM)
    return losses.mean()


for epoch in range(2):
    train_loss = distributed_train_epoch(iter(train_dist_dataset))
    print(f"Epoch {epoch + 1}, Loss: {train_loss}, Accuracy: {train_accuracy.result() * 100}")
    train_accuracy.reset_state()

print(f"Accuracy after restoring the saved model without strategy: {restored_accuracy:.1f}")

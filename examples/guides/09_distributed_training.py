# Expected last line: Steps after restoring: 50, prediction for 1: 2.68, restored: 2.68
"""Ports "Distributed training with TensorFlow", https://www.tensorflow.org/guide/distributed_training

    python examples/guides/09_distributed_training.py

Differences from TensorFlow's guide:

- Devices are named for two CPU devices, so that every section runs anywhere.
- TPUStrategy, MultiWorkerMirroredStrategy and ParameterServerStrategy are in guides of their own.
- `sg.input.Dataset` replaces the tf.data pipeline, `sg.value_and_grad` GradientTape.
- The custom loop has a metric and a checkpoint as well, as the text of the guide advises.
"""

import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np

# Where there is no accelerator the CPU counts as two devices; ignored where there is one.
jax.config.update("jax_num_cpu_devices", 2)

keras.utils.set_random_seed(0)

# Types of strategies: MirroredStrategy
mirrored_strategy = sg.MirroredStrategy()
mirrored_strategy = sg.MirroredStrategy(
    devices=["/cpu:0", "/cpu:1"], cross_device_ops=sg.HierarchicalCopyAllReduce()
)

# CentralStorageStrategy
central_storage_strategy = sg.experimental.CentralStorageStrategy()

# Default strategy
default_strategy = sg.get_strategy()
strategy = sg.get_strategy()
print(strategy.reduce("SUM", 1.0, axis=None))  # reduce some values
with strategy.scope():
    print(sg.Variable(1.0))

# OneDeviceStrategy
strategy = sg.OneDeviceStrategy(device="/cpu:0")

# Use a strategy with Keras Model.fit
with mirrored_strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((1,)),
            keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-4)),
        ]
    )
    model.compile(loss="mse", optimizer="sgd")

pairs = (np.ones((100, 1), "float32"), np.ones((100, 1), "float32"))
dataset = sg.input.Dataset(pairs, batch_size=10)
model.fit(dataset, epochs=2, verbose=2)
model.evaluate(dataset, verbose=2)

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10, verbose=2)

# Compute a global batch size using a number of replicas
BATCH_SIZE_PER_REPLICA = 10
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15, 20: 0.175}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

# Use a strategy with custom training loops
with mirrored_strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((1,)),
            keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-4)),
        ]
    )
    optimizer = keras.optimizers.SGD(learning_rate)
    train_accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
    checkpoint = sg.train.Checkpoint(model=model, optimizer=optimizer)

dataset = sg.input.Dataset(
    (np.ones((1000, 1), "float32"), np.ones((1000, 1), "float32")), batch_size=global_batch_size
)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

# Sets reduction="none" to leave it to compute_average_loss() below
loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def train_step(inputs):
    features, labels = inputs

    def loss_fn():
        predictions = model(features, training=True)
        per_example_loss = loss_object(labels, predictions)
        loss = sg.nn.compute_average_loss(per_example_loss)
        model_losses = model.losses
        if model_losses:
            loss += sg.nn.scale_regularization_loss(sum(model_losses))
        return loss, predictions

    (loss, predictions), gradients = sg.value_and_grad(
        loss_fn, model.trainable_variables, has_aux=True
    )
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


@sg.function
def distributed_train_step(dist_inputs):
    per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
    return mirrored_strategy.reduce(sg.ReduceOp.SUM, per_replica_losses, axis=None)


for dist_inputs in dist_dataset:
    loss = distributed_train_step(dist_inputs)
print(f"Loss {loss:.4f}, accuracy {train_accuracy.result():.2f}")

# Save here, to go on from here later
path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
saved_prediction = float(model(np.ones((1, 1)))[0, 0])

# Iterate for a given number of steps
iterator = iter(dist_dataset)
for _ in range(10):
    print(f"{distributed_train_step(next(iterator)):.4f}")

checkpoint.restore(path)
restored_prediction = float(model(np.ones((1, 1)))[0, 0])
print(
    f"Steps after restoring: {int(optimizer.iterations)}, prediction for 1: "
    f"{saved_prediction:.2f}, restored: {restored_prediction:.2f}"
)

# Expected last line: Epoch: 2, accuracy: 0.941875, train_loss: 0.206641.
"""Ports "Custom training loop with Keras and MultiWorkerMirroredStrategy",
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl

    stratagem launch --workers 2 examples/guides/04_multi_worker_with_ctl.py CHECKPOINTS

or with TF_CONFIG set by hand, in two shells. Started again with the same folder for checkpoints, it
goes on after the last epoch that was saved.

Differences from TensorFlow's guide:

- One program is what the guide writes into `mnist.py` and `main.py`.
- scikit-learn's digits of 8 x 8 pixels replace MNIST, so that a worker's batch is smaller.
- `sg.input.Dataset` replaces the tf.data pipeline, `sg.value_and_grad` GradientTape.
- The step takes a batch.
- The folder for checkpoints is an argument. Only the chief writes what all workers save, and gives
  the others its values. The temporary folders of the others stay empty.
- The epoch is counted before it is saved: what is restored is the epoch to come.
"""

import json
import os
import shutil
import sys
import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from sklearn.datasets import load_digits


# Dataset and model definition: mnist.py
def mnist_dataset(batch_size, num_shards, index):
    x_train, y_train = load_digits(return_X_y=True)
    # The values are in the range [0, 16].
    x_train = x_train.reshape(-1, 8, 8).astype(np.float32) / np.float32(16)
    train_dataset = sg.input.Dataset((x_train, y_train), batch_size=batch_size, shuffle=True)
    return train_dataset.shard(num_shards, index)


def dataset_fn(global_batch_size, input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    return mnist_dataset(
        batch_size, input_context.num_input_pipelines, input_context.input_pipeline_id
    )


def build_cnn_model():
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


# Define a custom training loop: main.py
per_worker_batch_size = 16
tf_config = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": ["localhost"]}}'))
num_workers = len(tf_config["cluster"]["worker"])
global_batch_size = per_worker_batch_size * num_workers

num_epochs = 3
num_steps_per_epoch = 50


# Checkpoint saving and restoring
def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    os.makedirs(temp_dir, exist_ok=True)
    return temp_dir


def write_filepath(filepath, task_type, task_id, cluster_spec):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id, cluster_spec):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


checkpoint_dir = os.path.join(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(), "ckpt")

# Define the strategy
strategy = sg.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)

with strategy.scope():
    # Model building needs to be within `Strategy.scope`.
    multi_worker_model = build_cnn_model()

    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: dataset_fn(global_batch_size, input_context)
    )
    optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


@sg.function
def train_step(batch):
    """Training step function."""

    def step_fn(inputs):
        """Per-Replica step function."""
        x, y = inputs

        def loss_fn():
            predictions = multi_worker_model(x, training=True)
            per_example_loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="none"
            )(y, predictions)
            loss = sg.nn.compute_average_loss(per_example_loss)
            model_losses = multi_worker_model.losses
            if model_losses:
                loss += sg.nn.scale_regularization_loss(sum(model_losses))
            return loss, predictions

        (loss, predictions), grads = sg.value_and_grad(
            loss_fn, multi_worker_model.trainable_variables, has_aux=True
        )
        optimizer.apply_gradients(zip(grads, multi_worker_model.trainable_variables, strict=True))
        train_accuracy.update_state(y, predictions)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(batch,))
    return strategy.reduce(sg.ReduceOp.SUM, per_replica_losses, axis=None)


epoch = sg.Variable(0, dtype="int32", name="epoch")
step_in_epoch = sg.Variable(0, dtype="int32", name="step_in_epoch")
task_type, task_id, cluster_spec = (
    strategy.cluster_resolver.task_type,
    strategy.cluster_resolver.task_id,
    strategy.cluster_resolver.cluster_spec(),
)

checkpoint = sg.train.Checkpoint(model=multi_worker_model, epoch=epoch, step_in_epoch=step_in_epoch)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id, cluster_spec)
checkpoint_manager = sg.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1
)

# Restoring the checkpoint
latest_checkpoint = sg.train.latest_checkpoint(checkpoint_dir)
if latest_checkpoint:
    checkpoint.restore(latest_checkpoint)

# Resume the training
while epoch.numpy() < num_epochs:
    iterator = iter(multi_worker_dataset)
    total_loss = 0.0
    num_batches = 0

    while step_in_epoch.numpy() < num_steps_per_epoch:
        total_loss += train_step(next(iterator))
        num_batches += 1
        step_in_epoch.assign_add(1)

    train_loss = total_loss / num_batches
    print(
        f"Epoch: {epoch.numpy()}, accuracy: {train_accuracy.result():f}, "
        f"train_loss: {train_loss:f}."
    )
    train_accuracy.reset_state()

    # Save, and remove the checkpoints that other workers than the chief saved.
    epoch.assign_add(1)
    step_in_epoch.assign(0)
    checkpoint_manager.save()
    if not _is_chief(task_type, task_id, cluster_spec):
        shutil.rmtree(write_checkpoint_dir)

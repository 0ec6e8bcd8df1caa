# Expected last line: Accuracy after 3 epochs: 0.940, goes on from the saved model: True
"""Ports "Multi-worker training with Keras",
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras

    stratagem launch --workers 2 examples/guides/03_multi_worker_with_keras.py

or with TF_CONFIG set by hand, in two shells:

    export TF_CONFIG='{"cluster": {"worker": ["localhost:12345", "localhost:23456"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/guides/03_multi_worker_with_keras.py

Differences from TensorFlow's guide:

- One program is what the guide writes into `mnist_setup.py`, `main.py` and its cells. Without
  TF_CONFIG there is one worker. The strategy comes first: workers meet before JAX starts.
- scikit-learn's digits of 8 x 8 pixels replace MNIST, with a learning rate fit to them.
- `sg.input.Dataset` replaces the tf.data pipeline; the last batch of each round of `repeat()` is
  short. `sg.BackupAndRestore` replaces Keras's callback.
- Only the chief writes what all workers save. The temporary folders of the others stay empty.
- The model is saved in Keras's format, which needs a name that ends with `.keras`.
"""

import json
import os
import shutil

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from sklearn.datasets import load_digits

FOLDER = os.path.join("runs", "guides", "multi_worker_with_keras")


# Dataset and model definition: mnist_setup.py
def mnist_dataset(batch_size):
    x_train, y_train = load_digits(return_X_y=True)
    # The values are in the range [0, 16].
    x_train = x_train.reshape(-1, 8, 8) / np.float32(16)
    x_train, y_train = x_train.astype(np.float32), y_train.astype(np.int32)
    return sg.input.Dataset((x_train, y_train), batch_size=batch_size, shuffle=True).repeat()


def build_and_compile_cnn_model():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


# Train the model: main.py
per_worker_batch_size = 64
tf_config = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": ["localhost"]}}'))
num_workers = len(tf_config["cluster"]["worker"])

strategy = sg.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)

global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_dataset(global_batch_size)

with strategy.scope():
    # Model building/compiling need to be within `strategy.scope()`.
    multi_worker_model = build_and_compile_cnn_model()

history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=70, verbose=2)

# Dataset sharding
options = sg.InputOptions(auto_shard_policy=sg.AutoShardPolicy.OFF)
dataset_no_auto_shard = strategy.experimental_distribute_dataset(mnist_dataset(64), options)
print(next(iter(dataset_no_auto_shard))[1])

# Evaluation
validation_dataset = mnist_dataset(global_batch_size)
results = multi_worker_model.evaluate(validation_dataset, steps=10, verbose=0)

# Performance
communication_options = sg.experimental.CommunicationOptions(
    implementation=sg.experimental.CommunicationImplementation.RING
)

# Model saving and loading
model_path = os.path.join(FOLDER, "keras-model.keras")


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    os.makedirs(temp_dir, exist_ok=True)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


os.makedirs(FOLDER, exist_ok=True)
task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id):
    shutil.rmtree(os.path.dirname(write_model_path))

loaded_model = keras.models.load_model(model_path)
goes_on = np.allclose(loaded_model.get_weights()[0], multi_worker_model.get_weights()[0])
single_worker_dataset = mnist_dataset(64)
loaded_model.fit(single_worker_dataset, epochs=2, steps_per_epoch=20, verbose=2)

# Checkpoint saving and restoring
checkpoint_dir = os.path.join(FOLDER, "ckpt")
checkpoint = sg.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
checkpoint_manager = sg.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1
)
checkpoint_manager.save()
if not _is_chief(task_type, task_id):
    shutil.rmtree(write_checkpoint_dir)

latest_checkpoint = sg.train.latest_checkpoint(checkpoint_dir)
checkpoint.restore(latest_checkpoint)
multi_worker_model.fit(multi_worker_dataset, epochs=2, steps_per_epoch=20, verbose=2)


# The BackupAndRestore callback
class PrintSteps(keras.callbacks.Callback):
    """Prints the steps that were made here, and those that a backup had."""

    def on_train_begin(self, logs=None):
        self.num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1

    def on_train_end(self, logs=None):
        total = int(self.model.optimizer.iterations)
        print(f"Steps of this run: {self.num_steps} of {total}")


callbacks = [sg.BackupAndRestore(backup_dir=os.path.join(FOLDER, "backup")), PrintSteps()]
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
multi_worker_model.fit(
    multi_worker_dataset, epochs=3, steps_per_epoch=70, callbacks=callbacks, verbose=2
)

# The training state is backed up at every 30 steps.
callbacks = [
    sg.BackupAndRestore(backup_dir=os.path.join(FOLDER, "backup"), save_freq=30),
    PrintSteps(),
]
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
multi_worker_model.fit(
    multi_worker_dataset, epochs=3, steps_per_epoch=70, callbacks=callbacks, verbose=2
)

accuracy = history.history["accuracy"][-1]
print(f"Accuracy after 3 epochs: {accuracy:.3f}, goes on from the saved model: {goes_on}")

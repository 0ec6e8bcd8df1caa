# Expected last line: Evaluation accuracy: 1.000000 directly, 1.000000 by the workers
"""Ports "Parameter server training with ParameterServerStrategy",
https://www.tensorflow.org/tutorials/distribute/parameter_server_training

    python examples/guides/05_parameter_server_training.py

Differences from TensorFlow's guide:

- The strategy starts workers and servers on this machine: no ports, no servers to make before.
- Words become ids in NumPy, since Keras's lookup layers need TensorFlow.
- `sg.input.Dataset` replaces the tf.data pipeline; the last batch of each round of `repeat()` is
  short. `sg.value_and_grad` replaces GradientTape.
- A sharded table is one Keras variable; its shards are `embeddings.variables`.
- The learning rate is smaller: Keras 3's RMSprop adds epsilon to the root, the legacy one under it.
- `sg.TensorBoard` and `sg.BackupAndRestore` replace Keras's callbacks.
- The files of ModelCheckpoint end with `.keras`, which Keras 3 asks for.
"""

import os
import random
import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

random.seed(0)
keras.utils.set_random_seed(0)

# Cluster setup
NUM_WORKERS = 2
NUM_PS = 2

# Instantiate a ParameterServerStrategy
variable_partitioner = sg.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=NUM_PS
)
strategy = sg.ParameterServerStrategy(
    num_workers=NUM_WORKERS, num_servers=NUM_PS, variable_partitioner=variable_partitioner
)

# Training with Model.fit: input data
global_batch_size = 64
x = np.random.default_rng(0).random((10, 10), "float32")
y = np.random.default_rng(1).random((10, 1), "float32")
dataset = sg.input.Dataset((x, y), batch_size=global_batch_size, shuffle=True).repeat()

# Model construction and compiling
with strategy.scope():
    model = keras.models.Sequential([keras.layers.Input((10,)), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(), loss="mse", steps_per_execution=10)

# Callbacks and training
working_dir = tempfile.mkdtemp()
log_dir = os.path.join(working_dir, "log")
ckpt_filepath = os.path.join(working_dir, "ckpt.keras")
backup_dir = os.path.join(working_dir, "backup")

callbacks = [
    sg.TensorBoard(log_dir=log_dir),
    keras.callbacks.ModelCheckpoint(filepath=ckpt_filepath),
    sg.BackupAndRestore(backup_dir=backup_dir),
]
model.fit(dataset, epochs=5, steps_per_epoch=20, callbacks=callbacks, verbose=2)

# Training with a custom training loop: set up the data
feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]


def feature_preprocess_stage(features):
    return np.array([[feature_vocab.index(word) + 1 for word in words] for words in features])


def label_preprocess_stage(labels):
    return np.array([[float(label_vocab.index(word)) for word in words] for words in labels])


def feature_and_label_gen(num_examples=200):
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        label = ["yes"] if "avenger" in features else ["no"]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


examples = feature_and_label_gen()


def preprocessed(examples):
    return (
        {"features": feature_preprocess_stage(examples["features"])},
        label_preprocess_stage(examples["label"]),
    )


def dataset_fn(_):
    return sg.input.Dataset(preprocessed(examples), batch_size=32, shuffle=True).repeat()


# Build the model
with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int32", name="features")
    emb_layer = keras.layers.Embedding(input_dim=len(feature_vocab) + 1, output_dim=16384)
    emb_output = keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = keras.layers.Dense(
        units=1, activation="sigmoid", kernel_regularizer=keras.regularizers.L2(1e-4)
    )(emb_output)
    model = keras.Model({"features": model_input}, dense_output)

    optimizer = keras.optimizers.RMSprop(learning_rate=0.005)
    accuracy = keras.metrics.Accuracy()

assert len(emb_layer.embeddings.variables) == 2
assert emb_layer.embeddings.variables[0].shape == (4, 16384)
assert emb_layer.embeddings.variables[1].shape == (4, 16384)


# Define the training step
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        def loss_fn():
            pred = model(batch_data, training=True)
            per_example_loss = keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
            loss = sg.nn.compute_average_loss(per_example_loss)
            model_losses = model.losses
            if model_losses:
                loss += sg.nn.scale_regularization_loss(sum(model_losses))
            return loss, pred

        (loss, pred), gradients = sg.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.5), "int32")
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(sg.ReduceOp.SUM, losses, axis=None)


# Dispatch training steps to remote workers
coordinator = sg.coordinator.ClusterCoordinator(strategy)


def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

num_epochs = 4
steps_per_epoch = 5
for i in range(num_epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    # Wait at epoch boundaries.
    coordinator.join()
    print(f"Finished epoch {i}, accuracy is {accuracy.result():f}.")

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print(f"Final loss is {loss.fetch():f}")

# Inline evaluation: direct evaluation
eval_dataset = sg.input.Dataset(preprocessed(feature_and_label_gen(num_examples=16)), batch_size=8)
eval_accuracy = keras.metrics.Accuracy()
for batch_data, labels in eval_dataset:
    pred = model(batch_data, training=False)
    actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.5), "int32")
    eval_accuracy.update_state(labels, actual_pred)
direct_accuracy = float(eval_accuracy.result())

# Inline evaluation: distributed evaluation
with strategy.scope():
    # Define the eval metric on parameter servers.
    eval_accuracy = keras.metrics.Accuracy()


def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.5), "int32")
        eval_accuracy.update_state(labels, actual_pred)

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


def eval_dataset_fn():
    eval_examples = preprocessed(feature_and_label_gen(num_examples=16))
    return sg.input.Dataset(eval_examples, batch_size=8, shuffle=True).repeat()


per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)
per_worker_eval_iterator = iter(per_worker_eval_dataset)
eval_steps_per_epoch = 2
for _ in range(eval_steps_per_epoch):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()
distributed_accuracy = float(eval_accuracy.result())

# Parameter server or coordinator failure: checkpoints of a custom loop
checkpoint_dir = os.path.join(working_dir, "loop")
checkpoint_manager = sg.train.CheckpointManager(
    sg.train.Checkpoint(model=model, optimizer=optimizer), checkpoint_dir, max_to_keep=3
)
checkpoint_manager.save()
checkpoint_manager.checkpoint.restore(checkpoint_manager.latest_checkpoint)
global_steps = int(optimizer.iterations.numpy())
starting_epoch = global_steps // steps_per_epoch
print(f"Steps {global_steps}, to go on with epoch {starting_epoch}")

print(f"Evaluation accuracy: {direct_accuracy:f} directly, {distributed_accuracy:f} by the workers")

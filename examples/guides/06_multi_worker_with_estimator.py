# Expected last line: Global step 270, loss below 0.6: True
"""Ports "Multi-worker training with Estimator",
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_estimator

    stratagem launch --workers 2 --evaluator examples/guides/06_multi_worker_with_estimator.py

or with TF_CONFIG set by hand, in three shells. All share the folder of the model.

Differences from TensorFlow's guide:

- scikit-learn's digits of 8 x 8 pixels replace MNIST, with batches and a learning rate fit to them,
  and the training has several epochs.
- `sg.input.Dataset` replaces the tf.data pipeline.
- The evaluator, a task of its own, looks for checkpoints each second, and ends with `max_steps`.
- `sg.estimator.minimize` replaces the `minimize` of a TensorFlow 1 optimizer.
"""

import os
import sys
import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Input function
BATCH_SIZE = 16
NUM_EPOCHS = 6
MAX_STEPS = 270  # of two workers that make all epochs


def input_fn(mode, input_context=None):
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images[..., None], digits.target, test_size=0.2, random_state=0
    )
    is_training = mode == sg.estimator.ModeKeys.TRAIN
    image, label = (images, labels) if is_training else (test_images, test_labels)
    image = image.astype(np.float32) / 16
    if is_training:
        image, label = np.tile(image, (NUM_EPOCHS, 1, 1, 1)), np.tile(label, NUM_EPOCHS)
    mnist_dataset = sg.input.Dataset((image, label), batch_size=BATCH_SIZE, shuffle=is_training)
    if input_context:
        mnist_dataset = mnist_dataset.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )
    return mnist_dataset


# Define the model
LEARNING_RATE = 0.1


def model_fn(features, labels, mode):
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    logits = model(features, training=False)

    if mode == sg.estimator.ModeKeys.PREDICT:
        predictions = {"logits": logits}
        return sg.estimator.EstimatorSpec(mode, predictions=predictions)

    optimizer = keras.optimizers.SGD(learning_rate=LEARNING_RATE)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(
        labels, logits
    )
    loss = keras.ops.sum(loss) * (1.0 / BATCH_SIZE)
    if mode == sg.estimator.ModeKeys.EVAL:
        return sg.estimator.EstimatorSpec(mode, loss=loss)

    return sg.estimator.EstimatorSpec(
        mode=mode, loss=loss, train_op=sg.estimator.minimize(optimizer, loss)
    )


# MultiWorkerMirroredStrategy
strategy = sg.experimental.MultiWorkerMirroredStrategy()

# Train and evaluate the model
config = sg.estimator.RunConfig(train_distribute=strategy, tf_random_seed=0)
model_dir = os.path.join(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(), "multiworker")
classifier = sg.estimator.Estimator(model_fn=model_fn, model_dir=model_dir, config=config)
results, _ = sg.estimator.train_and_evaluate(
    classifier,
    train_spec=sg.estimator.TrainSpec(input_fn=input_fn, max_steps=MAX_STEPS),
    eval_spec=sg.estimator.EvalSpec(input_fn=input_fn, start_delay_secs=0, throttle_secs=1),
)
print(results)
if results is not None:
    print(f"Global step {results['global_step']}, loss below 0.6: {results['loss'] < 0.6}")

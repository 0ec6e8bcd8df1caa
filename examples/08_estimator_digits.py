# Expected last line: Accuracy on one device: 0.975, on 2 replicas: 0.975
"""An Estimator on handwritten digits, on one device and, by one more line, on two replicas.

The model function is the same in both runs. Batches of an Estimator are those of one replica: two
replicas that take 32 examples each train as one device that takes 64, and have the same weights.
"""

import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

GLOBAL_BATCH_SIZE = 64
NUM_EPOCHS = 15


def main():
    pixels, digits = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        pixels.astype("float32") / 16, digits.astype("int32"), test_size=0.2, random_state=0
    )
    one_device = sg.estimator.RunConfig(tf_random_seed=0)
    mirrored = one_device.replace(train_distribute=sg.MirroredStrategy(["cpu:0", "cpu:1"]))

    results = []
    for config, num_replicas in ((one_device, 1), (mirrored, 2)):
        estimator = sg.estimator.Estimator(
            model_fn,
            model_dir=tempfile.mkdtemp(),
            config=config,
            params={"units": [64, 32], "learning_rate": 3e-3},
        )
        train_data = batches(images, labels, GLOBAL_BATCH_SIZE // num_replicas, epochs=NUM_EPOCHS)
        estimator.train(train_data)
        results.append(estimator.evaluate(batches(test_images, test_labels, GLOBAL_BATCH_SIZE)))
        weights = estimator.get_variable_value("logits/kernel")
        print(
            f"replicas {num_replicas}  step {results[-1]['global_step']}  "
            f"test loss {results[-1]['loss']:.3f}  sum of weights {np.sum(weights):.3f}"
        )
    first, second = (result["accuracy"] for result in results)
    print(f"Accuracy on one device: {first:.3f}, on 2 replicas: {second:.3f}")


def model_fn(features, labels, mode, params):
    hidden = features
    for units in params["units"]:
        hidden = layers.Dense(units, activation="relu")(hidden)
    logits = layers.Dense(10, name="logits")(hidden)
    if mode == sg.estimator.ModeKeys.PREDICT:
        return sg.estimator.EstimatorSpec(mode, predictions={"logits": logits})

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    if mode == sg.estimator.ModeKeys.EVAL:
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        accuracy.update_state(labels, logits)
        return sg.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})

    train_op = sg.estimator.minimize(keras.optimizers.Adam(params["learning_rate"]), loss)
    return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def batches(images, labels, batch_size, epochs=1):
    """The same examples in the same order, whatever the batch size is."""
    order = np.concatenate(
        [np.random.default_rng(e).permutation(len(images)) for e in range(epochs)]
    )
    return lambda: sg.input.Dataset((images[order], labels[order]), batch_size=batch_size)


if __name__ == "__main__":
    main()

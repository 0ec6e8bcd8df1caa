# Expected last line: Accuracy of the Estimator: 0.953, of fit: 0.953
"""A compiled Keras model as an Estimator, trained and evaluated in turn, beside plain `fit`.

The Estimator trains on two replicas a copy of the model, evaluates its checkpoints, and would go
on from the last one if it were started again with the same `model_dir`. `fit` trains the model
itself on one device with the same batches.
"""

import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

GLOBAL_BATCH_SIZE = 64
NUM_EPOCHS = 10


def main():
    pixels, digits = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        pixels.astype("float32") / 16, digits.astype("int32"), test_size=0.2, random_state=0
    )
    steps_per_epoch = len(images) // GLOBAL_BATCH_SIZE
    images = images[: steps_per_epoch * GLOBAL_BATCH_SIZE]  # whole batches, also across epochs
    labels = labels[: len(images)]
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = build_model()
    estimator = sg.estimator.model_to_estimator(
        model,
        model_dir=tempfile.mkdtemp(),
        config=sg.estimator.RunConfig(
            train_distribute=strategy,
            eval_distribute=strategy,
            save_checkpoints_steps=5 * steps_per_epoch,
        ),
    )
    batch_size = GLOBAL_BATCH_SIZE // strategy.num_replicas_in_sync  # of one replica
    order = np.tile(np.arange(len(images)), NUM_EPOCHS)
    train_spec = sg.estimator.TrainSpec(
        lambda: sg.input.Dataset((images[order], labels[order]), batch_size=batch_size),
        max_steps=NUM_EPOCHS * steps_per_epoch,
    )
    eval_spec = sg.estimator.EvalSpec(
        lambda: sg.input.Dataset((test_images, test_labels), batch_size=batch_size),
        steps=None,
        throttle_secs=0,
    )
    results, _ = sg.estimator.train_and_evaluate(estimator, train_spec, eval_spec)

    model.fit(
        images, labels, batch_size=GLOBAL_BATCH_SIZE, epochs=NUM_EPOCHS, shuffle=False, verbose=0
    )
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"Accuracy of the Estimator: {results['accuracy']:.3f}, of fit: {accuracy:.3f}")


def build_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, name="digit"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()

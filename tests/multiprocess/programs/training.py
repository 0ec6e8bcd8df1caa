"""Trains the digits CNN by `fit` and by a loop, and writes what came out.

`python training.py DEVICES FOLDER`: with TF_CONFIG on that cluster, with as many devices a worker,
as on the hosts of a TPU where STRATAGEM_TPU_PLATFORM is set; without it on one device. With
STRATAGEM_TEST_GROUP_SIZE that many devices form a replica, and the kernels are divided over them.
Each process writes what it saw to FOLDER/process-N.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import stratagem as sg

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
is_cluster = "TF_CONFIG" in os.environ
group_size = int(os.environ.get("STRATAGEM_TEST_GROUP_SIZE", "1"))
kernels = {
    ".*conv2d.*/kernel": (None, None, None, "logical"),
    ".*dense.*/kernel": ("logical", None),
}
strategy: sg.Strategy
if not is_cluster:
    strategy = sg.OneDeviceStrategy("cpu:0")
elif "STRATAGEM_TPU_PLATFORM" in os.environ:
    assert sg.tpu.initialize_tpu_system().num_tpus_per_task == int(sys.argv[1])
    strategy = sg.TPUStrategy()
else:
    strategy = sg.MultiWorkerMirroredStrategy(devices_per_replica=group_size, layout_map=kernels)
if is_cluster:  # the others have drawn something else by now
    np.random.seed(jax.process_index())
else:
    np.random.seed(0)
keras.utils.set_random_seed(7)
if jax.process_index() == 1:
    keras.random.normal((3,))
    np.random.normal(size=5)

images, targets = load_digits(return_X_y=True)
x = images[:601].reshape(-1, 8, 8, 1).astype("float32") / 16
y = targets[:601]
weights = np.linspace(0.5, 1.5, len(x)).astype("float32")
results: dict[str, np.ndarray] = {}


def make_model() -> keras.Model:
    with strategy.scope():
        return keras.Sequential(
            [
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Flatten(),
                keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(1e-3)),
            ]
        )


def by_fit() -> None:
    model = make_model()
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=3,
        )
    history = model.fit(
        x, y, sample_weight=weights, batch_size=64, epochs=2, validation_split=0.1, verbose=2
    )
    results["history"] = np.array([history.history[name] for name in sorted(history.history)])
    results["evaluate"] = np.array(model.evaluate(x, y, batch_size=50, verbose=0))
    results["predict"] = model.predict(x[:77], batch_size=10, verbose=0)
    path = Path(sys.argv[2]) / "model.keras"
    model.save(path)
    results["loaded"] = keras.models.load_model(path).predict(x[:77], verbose=0)
    for index, value in enumerate(model.get_weights()):
        results[f"fit weight {index}"] = value
    if group_size > 1:
        check_divided_state(model)


def check_divided_state(model: keras.Model) -> None:
    """Each device has its piece, also after a checkpoint was saved and restored."""
    kernels = [model.layers[0].kernel, model.layers[-1].kernel]
    values = [np.asarray(kernel.value) for kernel in kernels]
    checkpoint = sg.train.Checkpoint(model=model)
    path = checkpoint.save(os.path.join(sys.argv[2], "divided"))
    for kernel in kernels:
        kernel.assign(np.zeros(kernel.shape))
    checkpoint.restore(path)
    for kernel, value in zip(kernels, values, strict=True):
        np.testing.assert_array_equal(kernel.value, value)
        for shard in kernel.storage.addressable_shards:
            assert shard.data.size * group_size == value.size
            np.testing.assert_array_equal(shard.data, value[shard.index])


def by_loop() -> None:
    model = make_model()
    with strategy.scope():
        model.build((None, 8, 8, 1))
        optimizer = keras.optimizers.SGD(0.05)
        seen = keras.metrics.Mean()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch):
        images, labels = batch

        def loss_fn():
            per_example = loss_object(labels, model(images, training=True))
            return sg.compute_average_loss(per_example)

        loss, grads = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        seen.update_state(labels)
        return loss, labels

    losses = []
    for epoch in range(2):
        for batch in strategy.distribute_dataset(sg.input.Dataset((x, y), batch_size=64)):
            loss, labels = strategy.run(step, args=(batch,))
            losses.append(float(strategy.reduce("sum", loss, axis=None)))
            results[f"labels {epoch}"] = np.asarray(strategy.gather(labels, axis=0))
    results["losses"] = np.array(losses)
    results["mean of labels"] = np.array(float(seen.result()))
    for index, value in enumerate(model.get_weights()):
        results[f"loop weight {index}"] = value


by_fit()
by_loop()
np.savez(Path(sys.argv[2]) / f"process-{jax.process_index()}.npz", **results)

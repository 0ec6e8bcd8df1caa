# Expected last line: Best learning rate: 0.01
"""Ray Tune runs several trials at once, each with a strategy over its own devices.

python examples/ray/tune.py
"""

from pathlib import Path

import ray.tune

STORAGE = Path("runs", "ray").absolute()  # of several machines: a folder that all see, or s3://


def train(config):
    import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
    import keras
    from sklearn.datasets import load_digits

    class Report(keras.callbacks.Callback):
        """Reports the metrics of each epoch, by which Tune compares the trials."""

        def on_epoch_end(self, epoch, logs=None):
            ray.tune.report(logs)

    x, y = load_digits(return_X_y=True)
    strategy = sg.MirroredStrategy()  # over the devices that Ray gave to this trial
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(10, activation="softmax")]
        )
        optimizer = keras.optimizers.Adam(config["learning_rate"])
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x / 16, y, batch_size=128, epochs=3, verbose=0, callbacks=[Report()])


def main():
    # On GPUs: {"GPU": 2}. Without, a trial's devices are the virtual ones of its process.
    trainable = ray.tune.with_resources(train, {"CPU": 1})
    tuner = ray.tune.Tuner(
        trainable,
        param_space={"learning_rate": ray.tune.grid_search([1e-4, 1e-2])},
        tune_config=ray.tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=2),
        run_config=ray.tune.RunConfig(storage_path=str(STORAGE)),
    )
    best = tuner.fit().get_best_result()
    print(f"Best learning rate: {best.config['learning_rate']}")


if __name__ == "__main__":
    main()

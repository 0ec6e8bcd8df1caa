# Expected last line: Accuracy of the checkpoint: 0.82
"""Ray Train starts the workers, restarts them, and keeps the checkpoints; the strategy trains.

    python examples/ray/train.py --workers 2

The strategy finds the workers of `JaxTrainer` by itself. `BackupAndRestore` continues at the next
batch after a failure; the checkpoint that is reported is the model as Keras saves it.
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
from ray.train.v2.jax import JaxTrainer

STORAGE = Path("runs", "ray").absolute()  # of several machines: a folder that all see, or s3://


def train(config):
    import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
    import keras
    from sklearn.datasets import load_digits

    class Report(keras.callbacks.Callback):
        """Reports the metrics of each epoch, and the model from the first worker."""

        def on_epoch_end(self, epoch, logs=None):
            with tempfile.TemporaryDirectory() as folder:
                self.model.save(Path(folder, "model.keras"))  # on all workers; the first one writes
                is_first = ray.train.get_context().get_world_rank() == 0
                checkpoint = ray.train.Checkpoint.from_directory(folder) if is_first else None
                ray.train.report({"epoch": epoch, **logs}, checkpoint=checkpoint)

    x, y = load_digits(return_X_y=True)
    strategy = sg.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    backup = sg.BackupAndRestore(config["backup"], save_freq=10)
    model.fit(x / 16, y, batch_size=128, epochs=5, verbose=0, callbacks=[backup, Report()])
    print(f"{strategy.num_replicas_in_sync} replicas", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=STORAGE) as backup:
        trainer = JaxTrainer(
            train,
            train_loop_config={"backup": backup},
            scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
            run_config=ray.train.RunConfig(
                storage_path=str(STORAGE),
                failure_config=ray.train.FailureConfig(max_failures=3),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        print(f"Accuracy of the checkpoint: {accuracy_of(Path(folder, 'model.keras')):.2f}")


def accuracy_of(path):
    import stratagem  # noqa: F401  # isort: skip - before keras
    import keras
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    model = keras.saving.load_model(path)
    return model.evaluate(x / 16, y, verbose=0, return_dict=True)["accuracy"]


if __name__ == "__main__":
    STORAGE.mkdir(parents=True, exist_ok=True)
    main()

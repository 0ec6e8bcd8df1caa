"""Trains on handwritten digits, on as many workers as TF_CONFIG names; the leader saves the model.

    python train.py FOLDER [--epochs 20] [--batch-size 100]

Started alone, without TF_CONFIG, it trains on the devices of this machine.
"""

import argparse
from pathlib import Path

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
from sklearn.datasets import load_digits


def main():
    parser = argparse.ArgumentParser(description="Trains on handwritten digits.")
    parser.add_argument("folder", type=Path, help="where the leader saves the model")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=100, help="of all workers together")
    options = parser.parse_args()

    strategy = sg.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    images, labels = load_digits(return_X_y=True)
    model.fit(images / 16, labels, batch_size=options.batch_size, epochs=options.epochs, verbose=2)

    task = sg.cluster.detect()
    if task is None or sg.cluster.is_chief(task.cluster_spec(), task.task_type, task.task_id):
        options.folder.mkdir(parents=True, exist_ok=True)
        model.save(options.folder / "digits.keras")
        print(f"Saved {options.folder / 'digits.keras'}")


if __name__ == "__main__":
    main()

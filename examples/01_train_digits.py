# Expected last line: Test accuracy: 0.9972
"""Trains a convolutional network on handwritten digits, on as many devices as a strategy names.

    python examples/01_train_digits.py --strategy mirrored
    python examples/01_train_digits.py --strategy one_device --dropout 0
    stratagem launch --workers 2 examples/01_train_digits.py --strategy multi_worker

The strategy is chosen in `choose_strategy`; nothing else knows how many devices there are. Batch
size, loss and accuracy are those of one device: with `--dropout 0` every strategy draws the same
curve.
"""

import argparse
import json
import time
from pathlib import Path

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from keras import layers
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

NUM_CLASSES = 10
CONSOLE = Console(highlight=False)


def main():
    options = parse_options()
    strategy = choose_strategy(options.strategy, options.devices)
    CONSOLE.print(describe(strategy), soft_wrap=True)
    images, labels, test_images, test_labels = load(options.dataset)
    keras.utils.set_random_seed(options.seed)  # initial weights, order of the images, dropout

    steps_per_epoch = -(-len(images) // options.batch_size)
    with strategy.scope():
        model = build_model(images.shape[1:], options.dropout)
        schedule = keras.optimizers.schedules.CosineDecay(3e-3, options.epochs * steps_per_epoch)
        model.compile(
            optimizer=keras.optimizers.Adam(schedule),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=options.steps_per_execution,
        )

    progress = ProgressBar(num_images=len(images), steps_per_epoch=steps_per_epoch)
    # The test images draw the second curve; nothing is chosen by it.
    history = model.fit(
        images,
        labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test_images, test_labels),
        callbacks=[progress],
        verbose=0,
    ).history
    _, accuracy = model.evaluate(test_images, test_labels, batch_size=options.batch_size, verbose=0)

    folder = options.output or Path("runs", "train", options.strategy)
    write_results(folder, model, history, accuracy, progress.images_per_s, options)
    CONSOLE.print(f"Median speed: {np.median(progress.images_per_s):,.0f} images/s")
    CONSOLE.print(f"Model, history and learning curve: {folder}", soft_wrap=True)
    CONSOLE.print(f"Test accuracy: {accuracy:.4f}")


def choose_strategy(name, devices):
    if name == "one_device":
        return sg.OneDeviceStrategy(devices[0] if devices else 0)
    if name == "default":
        return sg.get_strategy()
    if name == "multi_worker":
        return sg.MultiWorkerMirroredStrategy()  # the cluster is in TF_CONFIG
    if name == "tpu":
        return sg.TPUStrategy()  # STRATAGEM_TPU_PLATFORM=cpu tries it without one
    if not devices:
        # Where there is no accelerator the CPU counts as two devices; ignored where there is one.
        jax.config.update("jax_num_cpu_devices", 2)
    return sg.MirroredStrategy(devices)


def describe(strategy):
    devices = strategy.topology.devices or jax.local_devices()[:1]
    names = ", ".join(f"{device.platform}:{device.id}" for device in devices)
    if jax.process_count() > 1:
        names = f"{len(devices)} devices of {jax.process_count()} processes"
    return f"{type(strategy).__name__} on {names} ({devices[0].device_kind})"


def load(dataset):
    """Returns training images, their labels, test images, their labels; images within 0 and 1."""
    if dataset == "mnist":
        (images, labels), (test_images, test_labels) = keras.datasets.mnist.load_data()
        images, test_images = images[..., None] / 255, test_images[..., None] / 255
        return images.astype("float32"), labels, test_images.astype("float32"), test_labels
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images[..., None].astype("float32") / 16,
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    shifts = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
    images = np.concatenate([shift(images, *offsets) for offsets in shifts])
    return images, np.tile(labels, len(shifts)), test_images, test_labels


def shift(images, rows, columns):
    """Moves images by at most a pixel each way: a moved 3 is a 3, and 1,437 images are few."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return padded[:, 1 - rows : 1 - rows + height, 1 - columns : 1 - columns + width]


def build_model(image_shape, dropout):
    # GELU has no kink. At ReLU's, where the empty background of a digit sits as a whole, a rounding
    # difference between one device and two grows from 1e-7 to 1e-2 of the loss within two epochs.
    return keras.Sequential(
        [
            layers.Input(image_shape),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.Conv2D(64, 3, padding="same", activation="gelu", strides=2),
            layers.Conv2D(64, 3, padding="same", activation="gelu"),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(NUM_CLASSES),
        ]
    )


class ProgressBar(keras.callbacks.Callback):
    """A bar over all epochs, and a line for each with loss, accuracy and speed."""

    def __init__(self, num_images, steps_per_epoch):
        super().__init__()
        self.num_images = num_images
        self.steps_per_epoch = steps_per_epoch
        self.images_per_s = []  # one an epoch, without the test; the first includes compilation
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=CONSOLE,
            transient=True,
            disable=not CONSOLE.is_terminal,
        )

    def on_train_begin(self, logs=None):
        total = self.params["epochs"] * self.steps_per_epoch
        self.task = self.bar.add_task("compiling", total=total)
        self.bar.start()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.start_s = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.bar.update(
            self.task,
            completed=self.epoch * self.steps_per_epoch + batch + 1,
            description=f"loss {float(logs['loss']):.4f}",  # waits for the devices to arrive here
        )

    def on_test_begin(self, logs=None):
        self.train_s = time.perf_counter() - self.start_s

    def on_epoch_end(self, epoch, logs=None):
        self.images_per_s.append(self.num_images / self.train_s)
        CONSOLE.print(
            f"epoch {epoch + 1:2d}/{self.params['epochs']}"
            f"  loss {logs['loss']:.4f} (test {logs['val_loss']:.4f})"
            f"  accuracy {logs['accuracy']:.4f} (test {logs['val_accuracy']:.4f})"
            f"  {self.images_per_s[-1]:,.0f} images/s",
            soft_wrap=True,
        )

    def on_train_end(self, logs=None):
        self.bar.stop()


def write_results(folder, model, history, accuracy, images_per_s, options):
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder / "model.keras")  # all processes call it, and one writes
    if jax.process_index() != 0:
        return
    strategy = model.distribute_strategy
    results = {
        "options": vars(options),
        "strategy": describe(strategy),
        "num_replicas": strategy.num_replicas_in_sync,
        "test_accuracy": accuracy,
        "images_per_s": images_per_s,
        "history": history,
    }
    (folder / "history.json").write_text(json.dumps(results, indent=2, default=str) + "\n")
    title = f"{describe(strategy)}: test accuracy {accuracy:.4f}"
    draw_learning_curve(history, title).savefig(folder / "learning_curve.png", dpi=150)


def draw_learning_curve(history, title):
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    epochs = range(1, len(history["loss"]) + 1)
    scales = {"loss": "log", "accuracy": "linear"}
    for axes, (quantity, scale) in zip(figure.subplots(1, 2), scales.items(), strict=True):
        for name, key, color in [("train", "", "#2a78b8"), ("test", "val_", "#d9702b")]:
            axes.plot(epochs, history[key + quantity], "o-", color=color, markersize=4, label=name)
        axes.set(xlabel="epoch", ylabel=quantity, yscale=scale)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def parse_options():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    strategies = ["mirrored", "multi_worker", "tpu", "one_device", "default"]
    add("--strategy", choices=strategies, default="mirrored")
    add("--devices", type=lambda names: names.split(","), help='such as "gpu:0,gpu:1"')
    add("--dataset", choices=["digits", "mnist"], default="digits", help="mnist is downloaded")
    add("--epochs", type=int, default=12)
    add("--batch-size", type=int, default=128, help="of all devices together")
    add("--dropout", type=float, default=0.3)
    add("--steps-per-execution", type=int, default=1, help="steps in one call on the device")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="folder of the results; runs/train/STRATEGY if not given")
    options = parser.parse_args()
    if options.devices and options.strategy in ("default", "multi_worker", "tpu"):
        parser.error(f"--strategy {options.strategy} takes the devices of JAX: leave --devices out")
    return options


if __name__ == "__main__":
    main()

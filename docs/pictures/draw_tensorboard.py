"""Draws docs/pictures/tensorboard.png: TensorBoard's page of a training, in a real browser.

    python docs/pictures/draw_tensorboard.py

It needs `chromium`, or a browser of its kind named by --browser, and `stratagem[observe]`.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
from keras import layers
from PIL import Image
from sklearn.datasets import load_digits

PICTURE = Path(__file__).with_name("tensorboard.png")
SIZE = (1560, 960)
EPOCHS = 12
OF_TRAINING = {"runId": "defaultExperimentId/train"}
CARDS = [
    {"plugin": "scalars", "tag": "epoch_loss"},
    {"plugin": "scalars", "tag": "epoch_accuracy"},
    {"plugin": "histograms", "tag": "activations", **OF_TRAINING},
    {"plugin": "images", "tag": "first channel", **OF_TRAINING, "sample": 0},
]


class Noting(layers.Layer):
    """Writes what it sees, as a histogram and as images."""

    def call(self, x):
        """Returns what it is given."""
        sg.summary.histogram("activations", x)
        sg.summary.image("first channel", x[:3, :, :, :1])
        return x


def main():
    """Trains, shows and takes the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--browser", default="chromium")
    browser = parser.parse_args().browser
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
        with served(folder) as address:
            pinned = urllib.parse.quote(json.dumps(CARDS))
            page = f"{address}/?darkMode=false&smoothing=0&pinnedCards={pinned}#timeseries"
            shot = Path(folder, "shot.png")
            take(browser, page, shot)
            with Image.open(shot) as picture:
                picture.convert("RGB").quantize(128).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def train(folder):
    """Trains a small network on handwritten digits, and writes summaries to a folder."""
    jax.config.update("jax_num_cpu_devices", 2)
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16
    with sg.MirroredStrategy().scope():
        model = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", activation="gelu"),
                Noting(),
                layers.Conv2D(32, 3, padding="same", activation="gelu", strides=2),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    callback = sg.TensorBoard(folder, histogram_freq=1, update_freq=20)
    model.fit(
        images,
        digits.target,
        batch_size=64,
        epochs=EPOCHS,
        validation_split=0.2,
        callbacks=[callback],
        verbose=0,
    )


@contextlib.contextmanager
def served(folder):
    """Runs TensorBoard for the length of a `with` block, and gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"]
    )
    try:
        address = f"http://127.0.0.1:{port}"
        while not has_runs(address):
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def has_runs(address):
    """Whether it has read the summaries."""
    try:
        with urllib.request.urlopen(f"{address}/data/runs", timeout=60) as answer:
            return b"validation" in answer.read()
    except OSError:
        return False


def take(browser, page, path):
    """Writes a picture of a page."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-3d-apis",  # charts that no GPU draws are SVG
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                "--virtual-time-budget=20000",
                f"--screenshot={path}",
                page,
            ],
            check=True,
            timeout=120,
        )


if __name__ == "__main__":
    main()

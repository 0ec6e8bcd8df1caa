"""Draws docs/pictures/notebook.png: a notebook that Jupyter has executed, in a real browser.

    python docs/pictures/draw_notebook.py

It needs `chromium`, or a browser of its kind named by --browser, `jupyterlab` and `nbclient`.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

PICTURE = Path(__file__).with_name("notebook.png")
SIZE = (1000, 1700)
CELLS_BOX = (42, 96, 960, 1540)  # without the menus of Jupyter
COLORS = 64
CELLS = [
    """\
import stratagem as sg
import keras, numpy as np

x = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")

def train(epochs):
    strategy = sg.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(128, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=256, epochs=epochs, verbose=2)
    return model.count_params()

sg.launch.spawn(train, (2,), workers=2)""",
    """\
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="optimizer")
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=256, verbose=0)
strategy.describe(model)""",
]


def main():
    """Executes the notebook, shows it and takes the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--browser", default="chromium")
    browser = parser.parse_args().browser
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    with tempfile.TemporaryDirectory() as folder:
        execute(Path(folder, "notebook.ipynb"))
        with served(folder) as address:
            shot = Path(folder, "shot.png")
            take(browser, f"{address}/doc/tree/notebook.ipynb", shot)
            image = Image.open(shot).convert("RGB").crop(CELLS_BOX)
        image.quantize(COLORS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


def execute(path):
    """Executes the cells in a kernel and writes them with their outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    nbformat.write(notebook, path)


@contextlib.contextmanager
def served(folder):
    """Runs JupyterLab on the folder and yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--allow-root", "--no-browser", f"--port={port}", "--IdentityProvider.token="]
    command = [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api/status").close()
                break
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def take(browser, page, path):
    """Takes a picture of a page once its scripts have drawn it."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=30000"]
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    subprocess.run([browser, *options, size, f"--screenshot={path}", page], check=True)


if __name__ == "__main__":
    main()

# Expected last line: Test accuracy: 0.906, 50 % of the kernels on each device
"""Two replicas of two devices each: a network's matrices are divided over the devices of a replica.

The first layer is divided by its columns and the second by its rows, so that what is between them
stays where it was computed: the devices of a replica add up what the second layer returns and
exchange nothing else. Each device sends gradients of its own pieces to the other replica.
With `--picture PATH` it draws what is where.
"""

import argparse
from pathlib import Path

import stratagem as sg

# isort: split
import keras
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

DEVICES = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
LAYOUTS = {
    "digits/hidden/kernel": (None, "logical"),
    "digits/hidden/bias": ("logical",),
    "digits/output/kernel": ("logical", None),
}
COLORS = ["#2a78b8", "#e08a2c"]
NUM_TRAINING = 1_500


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="where to draw what is where")
    arguments = parser.parse_args()
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    strategy = sg.MirroredStrategy(DEVICES, layout_map=LAYOUTS)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(256, "relu", name="hidden"),
                keras.layers.Dense(10, "softmax", name="output"),
            ],
            name="digits",
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images[:NUM_TRAINING], labels[:NUM_TRAINING], batch_size=100, epochs=20, verbose=0)
    accuracy = model.evaluate(images[NUM_TRAINING:], labels[NUM_TRAINING:], verbose=0)[1]
    if arguments.picture:
        draw(arguments.picture, strategy, model)
    part = part_on_a_device(strategy, model)
    print(f"Test accuracy: {accuracy:.3f}, {100 * part:.0f} % of the kernels on each device")


def part_on_a_device(strategy, model):
    """The part of the kernels and of what Adam keeps for them that a device holds."""
    kernels = [v for v in (*model.weights, *model.optimizer.variables) if v.path.count("kernel")]
    first = strategy.topology.devices[0]
    held = [
        piece.data.nbytes
        for kernel in kernels
        for piece in kernel.storage.addressable_shards
        if piece.device == first
    ]
    return sum(held) / sum(kernel.value.nbytes for kernel in kernels)


def draw(path, strategy, model):
    """Draws each kernel as the devices of each replica hold it."""
    replicas = strategy.topology.groups
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    grid = figure.subplots(len(model.layers), len(replicas))
    for row, layer in zip(grid, model.layers, strict=True):
        rows, columns = layer.kernel.shape
        for axes, (number, group) in zip(row, enumerate(replicas), strict=True):
            for piece in layer.kernel.storage.addressable_shards:
                if piece.device in group:
                    down, across = piece.index
                    left, top = across.start or 0, down.start or 0
                    height, width = piece.data.shape
                    color = COLORS[group.index(piece.device)]
                    axes.broken_barh([(left, width)], (top, height), facecolor=color, ec="white")
                    text = f"{piece.device}\n{height} x {width}"
                    middle = (left + width / 2, top + height / 2)
                    axes.text(*middle, text, ha="center", va="center", color="white", fontsize=9)
            axes.set_xlim(0, columns)
            axes.set_ylim(rows, 0)
            axes.set_xticks([0, columns])
            axes.set_yticks([0, rows])
            axes.set_title(f"replica {number}: {layer.name}/kernel", fontsize=10)
    figure.suptitle("Kernels of two replicas of two devices each", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

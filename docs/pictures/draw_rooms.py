"""Draws `rooms.png` from the table of `tests/architecture/test_layers.py`.

python docs/pictures/draw_rooms.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.architecture.test_layers import LAYERS

OUTLINE, FILL, VERTICAL, BOTTOM = "#4a5568", "#e8eef7", "#fdeedc", "#eeeeee"
WIDTH, ROW, GAP = 10.0, 0.36, 0.09
FILLS = {"parameter_server": VERTICAL, "keras": "#e3f4e6", "execution": "#efe6f7"}


def main() -> None:
    """Draws the picture beside this file."""
    layers = [*LAYERS[:-1], ("errors, messages, options, environment …",)]
    figure, axes = plt.subplots(figsize=(8.2, len(layers) * (ROW + GAP) * 0.92))
    height = len(layers) * (ROW + GAP)
    for number, layer in enumerate(layers):
        bottom = height - (number + 1) * (ROW + GAP)
        width = (WIDTH - GAP * (len(layer) - 1)) / len(layer)
        for place, room in enumerate(layer):
            left = place * (width + GAP)
            top = room.split(".")[0]
            fill = BOTTOM if number == len(layers) - 1 else FILLS.get(top, FILL)
            axes.add_patch(plt.Rectangle((left, bottom), width, ROW, fc=fill, ec=OUTLINE, lw=0.8))
            axes.text(left + width / 2, bottom + ROW / 2, room, ha="center", va="center", size=8.5)
        if "topology" in layer:
            line = bottom - GAP / 2
            axes.plot([-0.15, WIDTH + 0.15], [line, line], color="#c0392b", lw=1.2)
            axes.text(WIDTH + 0.25, line, "no JAX below", va="center", size=8, color="#c0392b")
    axes.annotate(
        "imports",
        xy=(-0.45, 0.1),
        xytext=(-0.45, height - 0.3),
        ha="center",
        size=8.5,
        rotation=90,
        arrowprops={"arrowstyle": "->", "color": OUTLINE},
    )
    axes.set_xlim(-0.8, WIDTH + 1.8)
    axes.set_ylim(-0.05, height + 0.05)
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("rooms.png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()

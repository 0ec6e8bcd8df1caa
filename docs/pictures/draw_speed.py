"""Draws `speed.png` from the first table of `docs/performance.md`.

python docs/pictures/draw_speed.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TABLE = HERE.parent / "performance.md"
MODELS = {"MLP": 1, "CNN": 4, "Transformer": 3}  # column of the table
PEERS = {
    "Keras `DataParallel`, same number per call": ("Keras DataParallel", "#8fb8de"),
    "TensorFlow `MirroredStrategy`, 1 per call": ("TensorFlow MirroredStrategy", "#f0a868"),
    "PyTorch DDP over Gloo": ("PyTorch DDP", "#c98bb9"),
}


def main() -> None:
    """Draws the picture beside this file."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    ratios = {row[0]: row for row in rows if row[0] in PEERS}
    figure, axes = plt.subplots(figsize=(7.6, 2.9))
    height = 0.24
    for number, (row, (name, color)) in enumerate(PEERS.items()):
        values = [_number(ratios[row][column]) for column in MODELS.values()]
        places = [model + (number - 1) * (height + 0.03) for model in range(len(MODELS))]
        bars = axes.barh(places, values, height, label=name, color=color)
        labels = axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, fontsize=9)
        for label in labels:
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})
    axes.axvline(1, color="#333333", linewidth=1.2)
    axes.set_yticks(range(len(MODELS)), MODELS)
    axes.invert_yaxis()
    axes.set_xlim(0, 4)
    axes.set_xlabel("speed of Stratagem's fit relative to the peer (1 = equal)")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "speed.png", dpi=150, facecolor="white")


def _number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell))


if __name__ == "__main__":
    main()

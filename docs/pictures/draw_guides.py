"""Draws the picture of each guide, in one visual language: `guide_*.png` and `placements.png`.

python docs/pictures/draw_guides.py [NAME ...]

Blue boxes compute, amber chips are variables, green is data, orange is gradients, violet stores
variables for others. Each picture has its own light background, for dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, MUTED, PAPER = "#1f2937", "#6b7280", "#fbfbf9"
DATA, GRADIENT, VALUE = "#15803d", "#c2410c", "#4338ca"
FILLS = {
    "replica": ("#dbeafe", "#1d4ed8"),
    "variable": ("#fde68a", "#b45309"),
    "data": ("#dcfce7", DATA),
    "server": ("#ede9fe", "#6d28d9"),
    "host": ("#e5e7eb", "#4b5563"),
    "frame": ("none", "#9ca3af"),
    "plain": ("#ffffff", "#4b5563"),
}
SIZE = 13
Point = tuple[float, float]


class Picture:
    """A canvas 100 units wide; y grows upward."""

    def __init__(self, height: float) -> None:
        """Creates an empty canvas."""
        self.figure, self.axes = plt.subplots(figsize=(6.4, 6.4 * height / 100))
        self.figure.patch.set_facecolor(PAPER)
        self.axes.set_position((0, 0, 1, 1))
        self.axes.set_xlim(0, 100)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")

    def box(
        self,
        kind: str,
        corner: Point,
        size: Point,
        text: str = "",
        *,
        top: bool = False,
        font: float = SIZE,
    ) -> None:
        """Draws a box; `top` writes its text at the upper edge, to leave room inside."""
        fill, edge = FILLS[kind]
        style = "--" if kind == "frame" else "-"
        self.axes.add_patch(
            FancyBboxPatch(
                (corner[0] + 0.8, corner[1] + 0.8),
                size[0] - 1.6,
                size[1] - 1.6,
                boxstyle="round,pad=0.8",
                fc=fill,
                ec=edge,
                lw=1.3,
                ls=style,
            )
        )
        y = corner[1] + size[1] - 1.6 if top else corner[1] + size[1] / 2
        self.text(
            (corner[0] + size[0] / 2, y),
            text,
            font=font,
            color=MUTED if kind == "frame" else INK,
            va="top" if top else "center",
        )

    def text(
        self,
        where: Point,
        text: str,
        *,
        font: float = SIZE,
        color: str = INK,
        ha: str = "center",
        va: str = "center",
    ) -> None:
        """Writes a text, by default around its middle."""
        self.axes.text(*where, text, ha=ha, va=va, size=font, color=color, linespacing=1.15)

    def arrow(
        self, start: Point, end: Point, color: str, *, both: bool = False, bend: float = 0.0
    ) -> None:
        """Draws an arrow, at both ends with `both`."""
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="<|-|>" if both else "-|>",
                mutation_scale=15,
                lw=2,
                color=color,
                shrinkA=0,
                shrinkB=0,
                connectionstyle=f"arc3,rad={bend}",
            )
        )

    def save(self, name: str) -> None:
        """Writes the picture beside this file."""
        path = Path(__file__).with_name(f"{name}.png")
        self.figure.savefig(path, dpi=150, facecolor=PAPER)
        plt.close(self.figure)


def keras() -> Picture:
    """`fit` on two replicas of one process."""
    p = Picture(66)
    p.box("data", (14, 57), (72, 7), "global batch: 100 rows")
    p.arrow((30, 57), (26, 47.5), DATA)
    p.arrow((70, 57), (74, 47.5), DATA)
    p.text((50, 52), "fit splits it", color=DATA)
    for left, name, rows in (
        (6, "replica 0 on gpu:0", "rows 0-49"),
        (54, "replica 1 on gpu:1", "rows 50-99"),
    ):
        p.box("replica", (left, 14), (40, 33), name, top=True)
        p.box("data", (left + 4, 32), (32, 8), rows)
        p.box("variable", (left + 4, 18), (32, 10), "weights, a copy")
    p.arrow((46.5, 24), (53.5, 24), GRADIENT, both=True)
    p.text((50, 10), "gradients are summed, and each copy gets the same update", color=GRADIENT)
    p.text((50, 4), "loss, metrics and weights are those of one device", color=MUTED)
    return p


def loops() -> Picture:
    """`strategy.run`: once outside, once per replica inside."""
    p = Picture(68)
    p.text((22, 64), "your loop: runs once", color=MUTED)
    p.text((77, 64), "your step: once per replica", color=MUTED)
    p.box("plain", (3, 45), (38, 13), "for batch in dataset:\nstrategy.run(step, batch)")
    p.box("plain", (3, 8), (38, 13), 'strategy.reduce(\n"SUM", losses)')
    for bottom, name in ((37, "replica 0"), (7, "replica 1")):
        p.box("replica", (57, bottom), (40, 22), name, top=True)
        p.box("data", (59, bottom + 3), (17, 10), "its part")
        p.box("variable", (78, bottom + 3), (17, 10), "weights")
    p.arrow((41.5, 54), (56.5, 51), DATA)
    p.arrow((41.5, 48), (56.5, 25), DATA)
    p.arrow((56.5, 40), (41.5, 18), VALUE)
    p.arrow((56.5, 11), (41.5, 12), VALUE)
    p.arrow((88, 36.5), (88, 29.5), GRADIENT, both=True)
    p.text((85.5, 33), "gradients", color=GRADIENT, ha="right")
    p.text((22, 39), "PerReplica batch", color=DATA, ha="center")
    p.text((20, 27), "PerReplica losses", color=VALUE, ha="center")
    p.text(
        (50, 3),
        "strategy.run compiles the right side into one program",
        color=MUTED,
        font=12,
    )
    return p


def many_workers() -> Picture:
    """Two workers of two replicas."""
    p = Picture(70)
    for left, worker in ((2, 0), (52, 1)):
        p.box("frame", (left, 17), (46, 51), f"worker {worker}: train.py", top=True)
        p.box("data", (left + 3, 53), (40, 8), "its part of each batch")
        for number in (0, 1):
            corner = left + 3 + 21 * number
            p.box("replica", (corner, 26), (19, 21), f"replica {2 * worker + number}", top=True)
            p.box("variable", (corner + 1.5, 29), (16, 9), "weights")
            p.arrow((corner + 9.5, 53), (corner + 9.5, 47.5), DATA)
    for x in (14.5, 35.5, 64.5, 85.5):
        p.arrow((x, 21), (x, 25.5), GRADIENT, both=False)
    p.axes.plot([14.5, 85.5], [21, 21], color=GRADIENT, lw=2, solid_capstyle="round")
    p.text(
        (50, 12), "one sum of gradients over all replicas, by network and inside", color=GRADIENT
    )
    p.text(
        (50, 5),
        "worker 0 writes files and shows progress; all workers see the same logs",
        color=MUTED,
        font=12,
    )
    return p


def parameter_servers() -> Picture:
    """Coordinator, workers and servers."""
    p = Picture(76)
    p.box("plain", (30, 63), (40, 11), "coordinator: your script")
    for left, number in ((4, 0), (56, 1)):
        p.box("replica", (left, 36), (40, 14), f"worker {number}", top=True)
        p.text((left + 20, 40.5), "computes gradients", font=12)
    p.arrow((40, 62.5), (28, 50.5), DATA)
    p.arrow((60, 62.5), (72, 50.5), DATA)
    p.text((50, 55), "batches or\nfunctions", color=DATA, font=12)
    for left, number in ((4, 0), (56, 1)):
        p.box("server", (left, 7), (40, 17), f"server {number}", top=True)
        p.box("variable", (left + 3, 9), (34, 8), "its part of the variables", font=11.5)
    for x, other in ((12, 60), (64, 18)):
        p.arrow((x, 35.5), (x, 24.5), GRADIENT)
        p.arrow((x + 24, 24.5), (x + 24, 35.5), VALUE)
        del other
    p.arrow((43, 35.5), (59, 24.5), GRADIENT)
    p.arrow((40, 24.5), (57.5, 35.5), VALUE)
    p.text((14, 30), "gradients", color=GRADIENT, ha="left", font=12)
    p.text((86.5, 30), "values", color=VALUE, ha="right", font=12)
    p.text(
        (50, 3),
        "workers do not wait for each other; a lost worker's batch goes to another",
        color=MUTED,
        font=12,
    )
    return p


def large_models() -> Picture:
    """A step with sharded state."""
    p = Picture(72)
    for left, number, part in ((2, 0, "first"), (58, 1, "second")):
        p.box("replica", (left, 14), (40, 55), f"replica {number}", top=True)
        p.box(
            "variable",
            (left + 3, 50),
            (34, 12),
            f"{part} half of weights\nand optimizer state",
            font=12,
        )
        p.box("plain", (left + 3, 33), (34, 9), "whole weights,\nfor a moment", font=12)
        p.box("plain", (left + 3, 18), (34, 8), "gradients of its rows", font=12)
        p.arrow((left + 20, 33), (left + 20, 26.5), DATA)
        p.arrow((left + 20, 49.5), (left + 20, 42.5), VALUE)
    p.arrow((39.5, 52), (60.5, 40), VALUE)
    p.arrow((60.5, 52), (39.5, 40), VALUE)
    p.text((50, 56), "gather", color=VALUE)
    p.arrow((39.5, 22), (60.5, 22), GRADIENT, both=True)
    p.text((50, 26.5), "sum", color=GRADIENT)
    p.text((50, 9), "each replica gets the sum for its half, and updates its half", color=GRADIENT)
    p.text(
        (50, 3.5),
        'shard_state="all": between steps, 1/n of everything per device',
        color=MUTED,
        font=12,
    )
    return p


def logical_devices() -> Picture:
    """Two replicas of two devices."""
    p = Picture(72)
    for left, number, names in ((2, 0, ("gpu:0", "gpu:1")), (52, 1, ("gpu:2", "gpu:3"))):
        p.box("frame", (left, 17), (46, 53), f"replica {number}: half of the rows", top=True)
        for place, name in enumerate(names):
            corner = left + 2.5 + 23 * place
            p.box("replica", (corner, 28), (18, 34), name, top=True)
            p.box(
                "variable",
                (corner + 1, 42),
                (16, 12),
                ("left", "right")[place] + " half\nof kernel",
                font=11.5,
            )
            p.text((corner + 9, 35), "its half\nof units", font=11.5)
        p.arrow((left + 20.8, 35), (left + 25.2, 35), DATA, both=True)
    p.text((25, 24), "activations", color=DATA)
    p.text((75, 24), "activations", color=DATA)
    p.arrow((13, 17), (65, 17), GRADIENT, both=True, bend=0.1)
    p.text((50, 9.5), "gradients, half by half", color=GRADIENT)
    p.text(
        (50, 4), "batch over replicas, layers over the devices of a replica", color=MUTED, font=12
    )
    return p


def tpu() -> Picture:
    """Two slices of chips."""
    p = Picture(66)
    for left, name in ((1, "slice 0"), (58, "slice 1")):
        p.box("frame", (left, 16), (41, 48), name, top=True)
        for chip, (x, y) in enumerate(((3, 40), (23, 40), (23, 20), (3, 20))):
            p.box("replica", (left + x, y), (15, 16), f"chip {chip}", top=True, font=12)
            p.box("variable", (left + x + 1, y + 2), (13, 7), "weights", font=10)
        for start, end in (
            ((18.5, 48), (22.5, 48)),
            ((30.5, 39.5), (30.5, 36.5)),
            ((22.5, 28), (18.5, 28)),
            ((10.5, 36.5), (10.5, 39.5)),
        ):
            p.arrow((left + start[0], start[1]), (left + end[0], end[1]), GRADIENT)
    p.arrow((43, 38), (57, 38), GRADIENT, both=True)
    p.text((50, 45), "slower\nnetwork", color=MUTED, font=12)
    p.text(
        (50, 11),
        "gradients: inside a slice, 1/n between slices, back inside",
        color=GRADIENT,
        font=12.5,
    )
    p.text((50, 4.5), "one replica per chip; steps_per_run steps per call", color=MUTED, font=12)
    return p


def estimator() -> Picture:
    """Training, checkpoints and evaluation of an Estimator."""
    p = Picture(70)
    p.box("data", (3, 56), (26, 10), "input_fn")
    p.box("plain", (37, 56), (26, 10), "model_fn")
    p.box("plain", (71, 56), (26, 10), "RunConfig")
    for x, end in ((16, 34), (50, 50), (84, 66)):
        p.arrow((x, 55.5), (end, 49.5), DATA if x == 16 else MUTED)
    p.box("plain", (14, 38), (72, 11), "Estimator.train: replicas of a strategy")
    p.arrow((50, 37.5), (50, 31.5), VALUE)
    p.text((53, 34.5), "checkpoints, events", color=VALUE, ha="left", font=12)
    p.box("host", (26, 21), (48, 10), "model_dir")
    for end in (16, 50, 84):
        p.arrow((50 + (end - 50) * 0.55, 20.5), (end, 14.5), VALUE)
    p.box("plain", (3, 4), (28, 10), "evaluate")
    p.box("plain", (36, 4), (28, 10), "predict")
    p.box("plain", (69, 4), (28, 10), "export")
    return p


def placements() -> Picture:
    """Four placements of a variable."""
    p = Picture(92)
    panels = {
        (2, 49): "mirrored",
        (52, 49): "sharded",
        (2, 3): "offloaded to the host",
        (52, 3): "on parameter servers",
    }
    for (left, bottom), name in panels.items():
        p.box("frame", (left, bottom), (46, 41), name, top=True)
        for number in (0, 1):
            p.box(
                "replica",
                (left + 2 + 24 * number, bottom + 17),
                (18, 16),
                f"device {number}",
                top=True,
                font=12,
            )
    for x in (5, 29):
        p.box("variable", (x, 68), (16, 8), "whole", font=12)
    p.arrow((22.5, 72), (27.5, 72), GRADIENT, both=True)
    p.text((25, 58), "sum of gradients", color=GRADIENT, font=12)
    p.box("variable", (55, 68), (9, 8), "1st", font=12)
    p.box("variable", (86, 68), (9, 8), "2nd", font=12)
    p.arrow((72.5, 76), (77.5, 76), VALUE, both=True)
    p.arrow((72.5, 70), (77.5, 70), GRADIENT, both=True)
    p.text((75, 60), "gather weights,", color=VALUE, font=12)
    p.text((75, 55.5), "scatter gradients", color=GRADIENT, font=12)
    for left, kind, name in ((2, "host", "host"), (52, "server", "servers")):
        p.box(kind, (left + 6, 4.5), (34, 9), "", font=12)
        p.text((left + 15, 9), name, font=12)
        p.box("variable", (left + 23, 5.5), (14, 7), "whole" if kind == "host" else "rows", font=12)
        for x in (left + 12, left + 33):
            p.arrow((x - 2, 13.5), (x - 2, 20), VALUE)
            p.arrow((x + 2, 20), (x + 2, 13.5), GRADIENT)
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "guide_keras": keras,
    "guide_loops": loops,
    "guide_many_workers": many_workers,
    "guide_parameter_servers": parameter_servers,
    "guide_large_models": large_models,
    "guide_logical_devices": logical_devices,
    "guide_tpu": tpu,
    "guide_estimator": estimator,
    "placements": placements,
}


def main(names: list[str]) -> None:
    """Draws the named pictures, by default all."""
    for name in names or PICTURES:
        PICTURES[name]().save(name)


if __name__ == "__main__":
    main(sys.argv[1:])

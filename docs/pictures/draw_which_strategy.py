"""Draws `which_strategy.png`: two questions, where a program runs and if its model fits.

python docs/pictures/draw_which_strategy.py
"""

from __future__ import annotations

from draw_guides import MUTED, VALUE, Picture

RUNS = (
    ("on TPU chips", "TPUStrategy()"),
    ("workers that come and go,\nno waiting for each other", "ParameterServerStrategy()"),
    ("on many machines\nor processes", "MultiWorkerMirroredStrategy()"),
    ("on one device", "OneDeviceStrategy()"),
    ("on all devices\nof one machine", "MirroredStrategy()"),
)
FITS = (
    ("optimizer state\ntoo large", 'shard_state="optimizer"'),
    ("weights too large", 'shard_state="all"'),
    ("embedding\ntoo large", 'placement={"embedding":\n"sharded"}'),
    ("one layer too large", "layout_map={...}"),
    ("all devices together\ntoo small", "CentralStorageStrategy,\nin pinned host memory"),
)
ROW, GAP = 11, 3


def questions(picture: Picture, top: float, title: str, rows: tuple[tuple[str, str], ...]) -> None:
    """Draws a column of questions; each leads to its answer, or down to the next."""
    picture.text((50, top), title, font=15)
    y = top - 5 - ROW
    for number, (question, answer) in enumerate(rows):
        picture.box("plain", (2, y), (40, ROW), question, font=12)
        picture.box("replica", (53, y), (45, ROW), answer, font=12)
        picture.arrow((42.5, y + ROW / 2), (52.5, y + ROW / 2), VALUE)
        if number + 1 < len(rows):
            picture.arrow((12, y - 0.3), (12, y - GAP + 0.3), MUTED)
            picture.text((15, y - GAP / 2), "no", font=10, color=MUTED, ha="left")
        y -= ROW + GAP


def main() -> None:
    """Draws the picture beside this file."""
    picture = Picture(163)
    questions(picture, 159, "1. Where does it run?", RUNS)
    questions(picture, 77, "2. Does the model fit? If not, add:", FITS)
    picture.save("which_strategy")


if __name__ == "__main__":
    main()

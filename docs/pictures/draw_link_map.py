"""Draws `link_map.png`: a transformer of 355 million parameters on 32 GPUs, by their network.

python docs/pictures/draw_link_map.py
"""

from __future__ import annotations

from pathlib import Path

import stratagem as sg

HERE = Path(__file__).parent
WIDTH, NUM_BLOCKS, VOCABULARY, LENGTH = 1024, 24, 50_257, 1024
COMPUTE_S = 0.25


def main() -> None:
    """Draws the picture beside this file."""
    kernels = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    vectors = [*((columns,) for _, columns in kernels), *[(WIDTH,)] * 4]
    shapes = [(VOCABULARY, WIDTH), (LENGTH, WIDTH), *NUM_BLOCKS * [*kernels, *vectors]]
    target = sg.planning.parse_target("32xH100")
    sg.planning.link_map(shapes, target, COMPUTE_S).draw(HERE / "link_map.png")


if __name__ == "__main__":
    main()

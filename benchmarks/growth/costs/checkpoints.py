"""Checkpoints of a number of small arrays."""

from __future__ import annotations

import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import numpy as np

from benchmarks.growth.costs.serving import Answer, cpu_and_elapsed_s, serve_costs

__all__ = ["measure"]

_NUM_ELEMENTS = 16


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns how long a checkpoint of `size` arrays takes to save and to restore."""
    num_times = 1 if is_smallest else 2
    arrays = {f"array_{index}": np.full(_NUM_ELEMENTS, index, np.float32) for index in range(size)}
    checkpoint = sg.train.Checkpoint(arrays=arrays)
    restored = sg.train.Checkpoint(arrays=jax.tree.map(np.zeros_like, arrays))
    with tempfile.TemporaryDirectory() as folder:
        first = sg.train.Checkpoint(arrays=[np.zeros(1)])  # loads Orbax
        first.read(first.write(f"{folder}/first"))
        saved = [
            cpu_and_elapsed_s(lambda number=number: checkpoint.write(f"{folder}/{number}"))
            for number in range(num_times)
        ]
        read = [
            cpu_and_elapsed_s(lambda: restored.read(f"{folder}/0").assert_consumed())
            for _ in range(num_times)
        ]
    last = f"array_{size - 1}"
    np.testing.assert_array_equal(restored.arrays[last], arrays[last])
    costs: dict[str, float] = {}
    for name, times in {"save": saved, "restore": read}.items():
        costs[f"{name}_cpu_s"], costs[f"{name}_s"] = map(min, zip(*times, strict=True))
    return {"ours": costs}


if __name__ == "__main__":
    serve_costs(measure)

"""Checkpoints of a number of small arrays."""

from __future__ import annotations

import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import numpy as np

from benchmarks.growth.costs.serving import Answer, cpu_s, elapsed_s, least, serve_costs

__all__ = ["measure"]

_NUM_ELEMENTS = 16


def measure(size: int, *, is_quick: bool) -> Answer:
    """Returns how long a checkpoint of `size` arrays takes to save and to restore."""
    num_times = 1 if is_quick else 2
    arrays = {
        f"array_{index}": np.full(_NUM_ELEMENTS, index, np.float32) for index in range(size)
    }
    zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
    checkpoint = sg.train.Checkpoint(arrays=arrays)
    restored = sg.train.Checkpoint(arrays=zeros)
    with tempfile.TemporaryDirectory() as folder:
        sg.train.Checkpoint(arrays=[np.zeros(1)]).write(f"{folder}/warm")  # imports Orbax
        paths: list[str] = []

        def save() -> None:
            paths.append(checkpoint.write(f"{folder}/{len(paths)}"))

        def restore() -> None:
            restored.read(paths[-1]).assert_consumed()

        costs = {
            "save_s": least(num_times, lambda: elapsed_s(save)),
            "restore_s": least(num_times, lambda: elapsed_s(restore)),
            "save_cpu_s": least(num_times, lambda: cpu_s(save)),
            "restore_cpu_s": least(num_times, lambda: cpu_s(restore)),
        }
    last = f"array_{size - 1}"
    np.testing.assert_array_equal(restored.arrays[last], arrays[last])
    return {"ours": costs}


if __name__ == "__main__":
    serve_costs(measure)

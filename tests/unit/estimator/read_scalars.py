"""Scalars of a summary folder, read with TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns (step, value) pairs by tag."""
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [
            (event.step, float(make_ndarray(event.tensor_proto))) for event in reader.Tensors(tag)
        ]
        for tag in reader.Tags()["tensors"]
    }

"""Reading event files with TensorBoard's own reader."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
from tensorboard.util import tensor_util


class Read:
    """The events of the files in a folder, and in none below it."""

    def __init__(self, folder: Path | str) -> None:
        self._events = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
        self._events.Reload()

    @property
    def tags(self) -> list[str]:
        """The names of all summaries."""
        return sorted(self._events.Tags()[TENSORS])

    def tensors(self, tag: str) -> list[tuple[int, np.ndarray]]:
        """The step and the value of each summary of a tag, in the order of the file."""
        return [
            (event.step, tensor_util.make_ndarray(event.tensor_proto))
            for event in self._events.Tensors(tag)
        ]

    def numbers(self, tag: str) -> list[tuple[int, float]]:
        """Likewise, of scalars."""
        assert self.plugin(tag) == "scalars"
        return [(step, value.item()) for step, value in self.tensors(tag)]

    def steps(self, tag: str) -> list[int]:
        """The steps of a tag."""
        return [step for step, _ in self.tensors(tag)]

    def images(self, tag: str) -> list[tuple[int, list[np.ndarray]]]:
        """The step and the decoded pictures of each summary."""
        assert self.plugin(tag) == "images"
        found: list[tuple[int, list[np.ndarray]]] = []
        for step, strings in self.tensors(tag):
            width, height, *files = strings.tolist()
            pictures = [np.asarray(Image.open(io.BytesIO(file))) for file in files]
            assert all(one.shape[:2] == (int(height), int(width)) for one in pictures)
            found.append((step, pictures))
        return found

    def plugin(self, tag: str) -> str:
        """The plugin of TensorBoard that shows a tag."""
        return self._events.SummaryMetadata(tag).plugin_data.plugin_name

    def description(self, tag: str) -> str:
        """Returns the metadata of a tag."""
        return self._events.SummaryMetadata(tag).summary_description

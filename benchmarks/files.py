"""Files of several formats through `distribute_dataset`, PyTorch's `DataLoader` and `tf.data`.

Nothing trains: the speed is that of reading, decoding and batching on the same cores. All sides run
in the environment of the peers, which has the libraries of all formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.cases import Case, Environments, Place, Side, jax_side, tensorflow_side
from benchmarks.image_files import FORMATS
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["make_cases"]

_IMAGES = "encoded_images"
_ONE = Place("cpu", 1)
_OF_TENSORFLOW = ("images in folders", "TFRecord")
_MAIN = (*_OF_TENSORFLOW, "webdataset")


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each format; devices make no difference, so there is one of them."""
    return [_case(file_format) for file_format in FORMATS] if _ONE in places else []


def _case(file_format: str) -> Case:
    references = [_torch(file_format)]
    if file_format in _OF_TENSORFLOW:
        references.append(_tensorflow(file_format))
    ours = jax_side("loop", "stratagem_files", _IMAGES, _ONE, file_format=file_format)
    return Case(
        name=f"JPEG: {file_format}",
        ours=dataclasses.replace(ours, environment="peers"),
        references=tuple(references),
        is_main=file_format in _MAIN,
    )


def _torch(file_format: str) -> Side:
    return Side(
        name="PyTorch DataLoader",
        module="benchmarks.workers.torch_files",
        options=WorkerOptions(workload=_IMAGES, file_format=file_format),
        environment="peers",
    )


def _tensorflow(file_format: str) -> Side:
    side = tensorflow_side("tf.data", "tensorflow_files", _IMAGES, _ONE, 1)
    options = dataclasses.replace(side.options, file_format=file_format)
    return dataclasses.replace(side, options=options)

"""Ours: files of images, read by Grain and distributed."""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import grain
import grain.experimental
import numpy as np
from absl import flags

from benchmarks.encoded_images import decode
from benchmarks.image_files import NUM_READERS, image_files, parse, read_image
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


class _Archives:
    """Examples of webdataset archives, with an index of them."""

    def __init__(self, paths: list[str]) -> None:
        self._examples: list[tuple[str, dict[str, tuple[int, int]]]] = []
        for path in paths:
            found: dict[str, dict[str, tuple[int, int]]] = {}
            with tarfile.open(path) as archive:
                for member in archive:
                    name, _, suffix = member.name.partition(".")
                    found.setdefault(name, {})[suffix] = (member.offset_data, member.size)
            self._examples += [(path, parts) for parts in found.values()]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, place: Any) -> Any:
        path, parts = self._examples[place]
        with open(path, "rb") as archive:
            return {suffix: _read(archive, *part) for suffix, part in parts.items()}


def _read(archive: Any, offset: int, size: int) -> bytes:
    archive.seek(offset)
    return archive.read(size)


def _of_archive(example: dict[str, bytes]) -> Any:
    return decode(example["jpeg"]), np.int32(example["cls"])


def _of_row(row: dict[str, Any]) -> Any:
    return decode(row["image"]), np.int32(row["label"])


def _mapped(source: Any, read: Callable[[Any], Any]) -> grain.IterDataset[Any]:
    shuffled = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(read)
    return shuffled.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16))


def _in_order(paths: list[str], kind: Any, read: Callable[[Any], Any]) -> grain.IterDataset[Any]:
    parts = grain.MapDataset.source(paths).seed(0).shuffle().repeat().map(kind)
    return grain.experimental.InterleaveIterDataset(parts, cycle_length=4).map(read)


_READERS: dict[str, Callable[[list[str]], grain.IterDataset[Any]]] = {
    "images in folders": functools.partial(_mapped, read=read_image),
    "ArrayRecord": lambda paths: _mapped(grain.sources.ArrayRecordDataSource(paths), parse),
    "webdataset": lambda paths: _mapped(_Archives(paths), _of_archive),
    "TFRecord": functools.partial(
        _in_order, kind=grain.experimental.TFRecordIterDataset, read=parse
    ),
    "Parquet": functools.partial(
        _in_order, kind=grain.experimental.ParquetIterDataset, read=_of_row
    ),
}


def prepare(options: WorkerOptions) -> Training:
    flags.FLAGS.mark_as_parsed()  # Grain's workers ask absl, which a plain script has not called
    workload = workload_of(options)
    examples = _READERS[options.file_format](image_files(options.file_format))
    source = examples.batch(workload.batch_size).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=NUM_READERS, per_worker_buffer_size=2)
    )
    taken = iter(sg.OneDeviceStrategy("cpu:0").distribute_dataset(source))

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            images, _ = next(taken)
        return float(images[0, 0, 0, 0])

    return Training(run_epochs, workload.steps_per_epoch)


if __name__ == "__main__":
    serve(prepare)

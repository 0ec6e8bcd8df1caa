"""Peer: files of images, read by PyTorch's `DataLoader`."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks.encoded_images import decode
from benchmarks.image_files import NUM_READERS, image_files, parse, read_image
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


class _Mapped(Dataset[Any]):
    def __init__(self, source: Any, read: Callable[[Any], Any]) -> None:
        self._source, self._read = source, read

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, place: int) -> Any:
        return self._read(self._source[place])


class _InOrder(IterableDataset[Any]):
    """Files in any order, each of one of the processes, without end."""

    def __init__(self, paths: list[str], read: Callable[[str], Iterator[Any]]) -> None:
        self._paths, self._read = paths, read

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        own = self._paths[worker.id :: worker.num_workers]
        shuffled = random.Random(worker.id)
        while True:
            shuffled.shuffle(own)
            for path in own:
                yield from self._read(path)


def _tfrecords(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        while head := file.read(12):
            (length,) = struct.unpack_from("<Q", head)
            yield parse(file.read(length + 4)[:-4])


def _rows(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(50):
        for row in batch.to_pylist():
            yield decode(row["image"]), np.int32(row["label"])


def _webdataset(paths: list[str]) -> Any:
    import webdataset as wds

    examples = wds.WebDataset(paths, shardshuffle=len(paths), seed=0).shuffle(100)
    return examples.map(lambda one: (decode(one["jpeg"]), np.int32(one["cls"]))).repeat()


def _array_records(paths: list[str]) -> Any:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return _Mapped(ArrayRecordDataSource(paths), parse)


_DATASETS: dict[str, Callable[[list[str]], Any]] = {
    "images in folders": lambda paths: _Mapped(paths, read_image),
    "TFRecord": lambda paths: _InOrder(paths, _tfrecords),
    "ArrayRecord": _array_records,
    "webdataset": _webdataset,
    "Parquet": lambda paths: _InOrder(paths, _rows),
}


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    dataset = _DATASETS[options.file_format](image_files(options.file_format))
    loader = DataLoader(
        dataset,
        batch_size=workload.batch_size,
        num_workers=NUM_READERS,
        persistent_workers=True,
        # Readers of ArrayRecord have threads, which crash in a forked process.
        multiprocessing_context="spawn" if options.file_format == "ArrayRecord" else None,
        shuffle=isinstance(dataset, _Mapped),
        collate_fn=_batch,
    )
    taken = itertools.chain.from_iterable(itertools.repeat(loader))

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            images, _ = next(taken)
        return float(images[0, 0, 0, 0])

    return Training(run_epochs, workload.steps_per_epoch)


def _batch(examples: list[Any]) -> Any:
    images, labels = zip(*examples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))


if __name__ == "__main__":
    serve(prepare)

"""Ours: the input service feeds a device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import stratagem as sg
from benchmarks.input_work import make_batch
from benchmarks.workers.starved_device import StarvedOptions, serve_batches

_NUM_FILES, _BATCHES_PER_FILE = 4096, 16


def _read(work: str, files: list[int]) -> Iterator[Any]:
    for file in files:
        for place in range(_BATCHES_PER_FILE):
            yield make_batch(work, _BATCHES_PER_FILE * file + place)


def _dataset(work: str, files: list[int]) -> sg.input.Dataset:
    return sg.input.Dataset.from_generator(_read, [work, files])


@contextlib.contextmanager
def _batches(options: StarvedOptions) -> Iterator[Iterator[Any]]:
    files = list(range(_NUM_FILES))
    dataset = sg.input.Dataset.from_files(files, functools.partial(_dataset, options.work))
    if options.num_workers == 0:
        yield iter(dataset)
        return
    with sg.input.service.start(options.num_workers) as service:
        distribute = sg.input.service.distribute("distributed_epoch", service.target)
        yield iter(dataset.apply(distribute))


if __name__ == "__main__":
    serve_batches(_batches)

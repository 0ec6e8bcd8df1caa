"""Distributed datasets: sources, splitting, padding and prefetching of batches."""

import importlib
from typing import TYPE_CHECKING, Any

from stratagem.input.batches import batch_sizes_for_worker
from stratagem.input.dataset import Dataset
from stratagem.input.distributed import DistributedDataset
from stratagem.input.iterator import DistributedIterator, OptionalBatch
from stratagem.input.sources.source import (
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    ArraySpec,
)

if TYPE_CHECKING:
    from stratagem.input import service as service

__all__ = [
    "ArraySpec",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "INFINITE_CARDINALITY",
    "OptionalBatch",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "batch_sizes_for_worker",
    "service",
]


def __getattr__(name: str) -> Any:
    # Loaded at its first use: it needs more than datasets do, such as ZeroMQ.
    if name != "service":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

"""Distributed datasets: sources, splitting, padding and prefetching of batches."""

from stratagem.input.dataset import Dataset
from stratagem.input.distributed import DistributedDataset
from stratagem.input.iterator import DistributedIterator, OptionalBatch
from stratagem.input.sources import (
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    ArraySpec,
)
from stratagem.input.splitting import batch_sizes_for_worker

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
]

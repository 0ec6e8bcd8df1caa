"""Distributed datasets: sources, splitting, padding and prefetching of batches."""

import importlib
from typing import TYPE_CHECKING, Any

from stratagem.input.batches import batch_sizes_for_worker as batch_sizes_for_worker
from stratagem.input.dataset import Dataset
from stratagem.input.distributed import DistributedDataset as DistributedDataset
from stratagem.input.iterator import DistributedIterator as DistributedIterator
from stratagem.input.sources.source import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from stratagem.input.sources.source import SHARD_HINT, ArraySpec
from stratagem.input.sources.source import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY

if TYPE_CHECKING:
    from stratagem.input import service as service

__all__ = [
    "ArraySpec",
    "Dataset",
    "SHARD_HINT",
    "service",
]


def __getattr__(name: str) -> Any:
    # Loaded at its first use: it needs more than datasets do, such as ZeroMQ.
    if name != "service":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

"""Sources of batches: one adapter for each kind of dataset."""

from stratagem.input.sources.adapters import as_source, batched_source, every_nth
from stratagem.input.sources.array_spec import ArraySpec
from stratagem.input.sources.arrays import ArraySource
from stratagem.input.sources.iterables import GeneratorSource
from stratagem.input.sources.repeated import (
    RepeatedReader,
    RepeatedSource,
    check_count,
    repeated_cardinality,
)
from stratagem.input.sources.shards import SHARD_HINT, FileSource, HintSource
from stratagem.input.sources.source import (
    BATCHES_PER_SNAPSHOT,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Reader,
    Source,
)

__all__ = [
    "ArraySource",
    "ArraySpec",
    "BATCHES_PER_SNAPSHOT",
    "FileSource",
    "GeneratorSource",
    "HintSource",
    "INFINITE_CARDINALITY",
    "Reader",
    "RepeatedReader",
    "RepeatedSource",
    "SHARD_HINT",
    "Source",
    "UNKNOWN_CARDINALITY",
    "as_source",
    "batched_source",
    "check_count",
    "every_nth",
    "repeated_cardinality",
]

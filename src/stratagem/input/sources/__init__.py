"""Sources of batches: one small adapter for each kind of dataset."""

from stratagem.input.sources.choice import as_source, batched_source
from stratagem.input.sources.source import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Reader,
    Source,
)

__all__ = [
    "INFINITE_CARDINALITY",
    "Reader",
    "Source",
    "UNKNOWN_CARDINALITY",
    "as_source",
    "batched_source",
]

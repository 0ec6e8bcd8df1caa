"""Embedding tables without a vocabulary, on parameter servers: `sg.embedding`."""

from stratagem.embedding.keys import keys
from stratagem.embedding.layer import DynamicEmbedding
from stratagem.embedding.table_stats import TableStats, stats
from stratagem.parameter_server.server.tables.policies import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    WithProbability,
)

__all__ = [
    "AfterSightings",
    "DynamicEmbedding",
    "LeastFrequent",
    "LeastRecent",
    "NotSeenFor",
    "TableStats",
    "WithProbability",
    "keys",
    "stats",
]

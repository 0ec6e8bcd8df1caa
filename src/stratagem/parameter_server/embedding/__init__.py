"""Embedding tables on parameter servers, without a vocabulary: `sg.embedding`."""

from stratagem.parameter_server.embedding.export import export
from stratagem.parameter_server.embedding.keys import keys
from stratagem.parameter_server.embedding.layer import DynamicEmbedding
from stratagem.parameter_server.embedding.saving import (
    compact,
    publish,
    restore,
    rollback,
    save,
)
from stratagem.parameter_server.embedding.serving import Tables
from stratagem.parameter_server.embedding.table_stats import TableStats, stats
from stratagem.parameter_server.server.tables.policies import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    WithProbability,
)
from stratagem.parameter_server.server.tables.table_options import TierOptions

__all__ = [
    "AfterSightings",
    "DynamicEmbedding",
    "LeastFrequent",
    "LeastRecent",
    "NotSeenFor",
    "TableStats",
    "Tables",
    "TierOptions",
    "WithProbability",
    "compact",
    "export",
    "keys",
    "publish",
    "restore",
    "rollback",
    "save",
    "stats",
]

"""Embedding tables on parameter servers, without a vocabulary: `sg.embedding`."""

from stratagem.parameter_server.embedding.layer import DynamicEmbedding, stats
from stratagem.parameter_server.embedding.saving import (
    compact,
    export,
    publish,
    restore,
    rollback,
    save,
)
from stratagem.parameter_server.embedding.serving import Tables
from stratagem.parameter_server.fingerprints import keys
from stratagem.parameter_server.server.tables.table_options import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    TierOptions,
    WithProbability,
)

__all__ = [
    "AfterSightings",
    "DynamicEmbedding",
    "LeastFrequent",
    "LeastRecent",
    "NotSeenFor",
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

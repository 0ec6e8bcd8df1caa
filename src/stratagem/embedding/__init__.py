"""Embedding tables without a vocabulary: saving, publication, serving and export."""

from stratagem.embedding.export import export
from stratagem.embedding.saving import compact, publish, restore, rollback, save
from stratagem.embedding.serving import Tables

__all__ = ["Tables", "compact", "export", "publish", "restore", "rollback", "save"]

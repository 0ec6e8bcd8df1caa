"""Rewriting of tf.data pipelines to `sg.input.Dataset`."""

from __future__ import annotations

from stratagem.migrate.context import StatementRewriter

__all__ = ["DatasetRewriter"]


class DatasetRewriter(StatementRewriter):
    """Rewrites pipelines that are understood as a whole."""

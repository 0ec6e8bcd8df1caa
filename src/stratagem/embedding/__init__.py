"""Embedding tables without a vocabulary, on parameter servers: `sg.embedding`."""

from stratagem.embedding.id_frequencies import IdFrequencies
from stratagem.embedding.metrics import AUC
from stratagem.embedding.plan import TableChoice, TablePlan, plan
from stratagem.embedding.table_costs import TableCluster, TableCosts, TableSize

__all__ = [
    "AUC",
    "IdFrequencies",
    "TableChoice",
    "TableCluster",
    "TableCosts",
    "TablePlan",
    "TableSize",
    "plan",
]

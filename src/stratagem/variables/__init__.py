"""How a variable lives: mirrored, one component a replica, or plain."""

from stratagem.variables.aggregation import aggregate_components, spread_over_components
from stratagem.variables.kind import (
    VariableKind,
    choose_kind,
    parse_aggregation,
    parse_synchronization,
)
from stratagem.variables.registry import Home, StoredVariable, VariableRegistry, home_of

__all__ = [
    "Home",
    "StoredVariable",
    "VariableKind",
    "VariableRegistry",
    "aggregate_components",
    "choose_kind",
    "home_of",
    "parse_aggregation",
    "parse_synchronization",
    "spread_over_components",
]
